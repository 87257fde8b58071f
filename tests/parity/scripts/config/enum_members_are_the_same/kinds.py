from enum import Enum, auto


class Kind(Enum):
    TRAIN = auto()
    TEST = auto()


NAMES = {Kind.TRAIN: "for training", Kind.TEST: "for tests"}


def describe(kind):
    return NAMES[kind]
