# parity: raises=TypeError
import torch
from torch.utils.data import DataLoader, Dataset


class Missing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.ones(2), None


print("start")
for batch in DataLoader(Missing(), batch_size=2, num_workers=2):
    print(batch)
