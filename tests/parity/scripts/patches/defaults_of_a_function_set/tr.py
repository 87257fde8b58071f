def crop(x, *, n=3):
    return x[:n]


def shift(x, by=1):
    return x + by
