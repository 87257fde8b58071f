import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Small(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.linspace(-2, 2, 12).add(i).to(torch.float8_e4m3fn), torch.ones(2).to(
            torch.float8_e8m0fnu
        )


for batch in DataLoader(Small(), batch_size=2, num_workers=2):
    show(batch)
