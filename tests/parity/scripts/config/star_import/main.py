from parity import show
from torch.utils.data import DataLoader, Dataset
from utils import *


class Named(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return label(i) + SUFFIX


SUFFIX = "!"
for batch in DataLoader(Named(), batch_size=4, num_workers=2):
    show(batch)
