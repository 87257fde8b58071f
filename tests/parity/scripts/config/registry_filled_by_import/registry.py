TRANSFORMS = {}


def transform(f):
    TRANSFORMS[f.__name__] = f
    return f
