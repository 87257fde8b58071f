import threading, contextlib

_local = threading.local()


def is_train():
    return getattr(_local, "train", False)


def set_train(v):
    _local.train = v
