# parity: raises=RuntimeError
import torch
from torch.utils.data import DataLoader, Dataset


class Ragged(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.zeros(1 + i // 2 * i)


for batch in DataLoader(Ragged(), batch_size=2, num_workers=1):
    print(batch)
