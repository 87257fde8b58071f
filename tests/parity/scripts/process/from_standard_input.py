# parity: stdin
import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

scale = 3


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.tensor(i * scale)


loader = DataLoader(Numbers(), batch_size=2, num_workers=2)
show(*loader)
scale = 4
show(*loader)
