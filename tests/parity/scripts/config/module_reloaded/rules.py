LIMIT = 0


def cut(x):
    return min(x, LIMIT)
