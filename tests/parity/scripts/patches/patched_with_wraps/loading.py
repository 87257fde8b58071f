import torch


def load(i):
    return torch.full((2,), float(i))


class Reader:
    def read(self, i):
        return load(i) + 100
