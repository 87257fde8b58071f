import warnings

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("error", category=FutureWarning)
table = torch.arange(8.0).share_memory_()


class Rows(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return table[i]


for batch in DataLoader(Rows(), batch_size=4, num_workers=2):
    show(batch)
