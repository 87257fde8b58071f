import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Large(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return torch.full((3, 224, 224), i, dtype=torch.float32), torch.full((50_000,), i)


for batch in DataLoader(Large(), batch_size=4, num_workers=2):
    show(batch)
