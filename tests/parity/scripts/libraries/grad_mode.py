import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Modes(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.is_grad_enabled()


loader = DataLoader(Modes(), batch_size=2, num_workers=1)
show(*loader)
with torch.no_grad():
    show(*loader)
