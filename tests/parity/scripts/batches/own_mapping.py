import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Item(dict):
    def __getattr__(self, name):
        return self[name]


class Samples(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return Item(x=torch.full((2,), i), y=i)


for batch in DataLoader(Samples(), batch_size=2, num_workers=2):
    show(batch, type(batch) is Item, batch.x)
