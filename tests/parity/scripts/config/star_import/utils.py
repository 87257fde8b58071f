__all__ = ["SUFFIX", "label"]
SUFFIX = "?"
_names = ["a", "b"]


def label(i):
    return _names[i % 2] + SUFFIX
