import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Compose:
    def __init__(self, *steps):
        self.steps = list(steps)

    def __call__(self, x):
        for step in self.steps:
            x = step(x)
        return x


class Images(Dataset):
    def __init__(self, transform=None):
        self.transform = transform

    def __len__(self):
        return 4

    def __getitem__(self, i):
        x = torch.arange(4.0) + i
        return self.transform(x) if self.transform else x


dataset = Images()
loader = DataLoader(dataset, batch_size=2, num_workers=2)
show(*loader)
dataset.transform = Compose(torch.flip and (lambda x: x.flip(0)), torch.neg)
show(*loader)
dataset.transform.steps.append(lambda x: x[:2])
show(*loader)
