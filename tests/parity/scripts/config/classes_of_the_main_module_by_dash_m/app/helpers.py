def scale(x):
    return 10 * x
