import data


def apply(x):
    return x * data.SCALE + 1
