from functools import lru_cache
from dataclasses import dataclass


@dataclass
class Settings:
    image_size: int = 4


@lru_cache
def get_settings():
    return Settings()
