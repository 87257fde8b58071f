import torch
from torch.utils.data import DataLoader
from parity import show
from convert import to_tensor, Encoder


class Box:
    def __init__(self, v):
        self.v = v


@to_tensor.register
def _(x: Box):
    return torch.tensor(float(x.v))


@Encoder.encode.register(Box)
def _(self, x):
    return torch.tensor(x.v * 3.0)


class D(torch.utils.data.Dataset):
    def __init__(self):
        self.items, self.enc = [Box(i) for i in range(4)], Encoder()

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return to_tensor(self.items[i]), self.enc.encode(self.items[i])


for b in DataLoader(D(), batch_size=2, num_workers=2):
    show(b)
