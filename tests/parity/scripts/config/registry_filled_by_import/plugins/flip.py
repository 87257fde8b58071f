from registry import transform


@transform
def flip(x):
    return x.flip(0)
