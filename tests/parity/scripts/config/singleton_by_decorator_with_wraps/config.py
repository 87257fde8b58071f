import functools


def singleton(cls):
    instances = {}

    @functools.wraps(cls)
    def get(*args, **kwargs):
        if cls not in instances:
            instances[cls] = cls(*args, **kwargs)
        return instances[cls]

    return get


@singleton
class Config:
    def __init__(self):
        self.size = 4
        self.scale = 1.0
