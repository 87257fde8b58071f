import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class ImageList(list):
    def stack(self):
        return torch.stack(list(self))


class Images(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.full((2,), i)


for batch in DataLoader(Images(), batch_size=2, num_workers=2, collate_fn=ImageList):
    show(type(batch).__name__, list(batch), batch.stack())
