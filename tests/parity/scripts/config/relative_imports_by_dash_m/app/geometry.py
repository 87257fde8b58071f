def rotate(x):
    return x.rot90()
