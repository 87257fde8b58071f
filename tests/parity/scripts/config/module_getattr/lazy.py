calls = []


def __getattr__(name):
    if name.startswith("doubled_"):
        return 2 * int(name.removeprefix("doubled_")) + 100 * len(calls)
    raise AttributeError(name)
