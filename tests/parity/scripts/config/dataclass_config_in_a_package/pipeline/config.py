from dataclasses import dataclass


@dataclass(frozen=True)
class Config:
    length: int = 1
    special: tuple = ()


current = Config()
