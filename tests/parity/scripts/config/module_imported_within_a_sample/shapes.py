scale = 1


class Square:
    def __init__(self, side):
        self.side = side


def area(shape):
    return scale * shape.side**2
