class cfg:
    size = 4


def merge(**k):
    for a, b in k.items():
        setattr(cfg, a, b)
