import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Nested(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        value = torch.tensor([i])
        for depth in range(30):
            value = [value] if depth % 2 else {"d": value}
        return value


for batch in DataLoader(Nested(), batch_size=None, num_workers=1):
    show(batch)
