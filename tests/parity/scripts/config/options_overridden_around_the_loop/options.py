import contextlib

options = {"mode": "plain", "level": 1}


@contextlib.contextmanager
def override(**values):
    before = dict(options)
    options.update(values)
    try:
        yield
    finally:
        options.clear()
        options.update(before)
