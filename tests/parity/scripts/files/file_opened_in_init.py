import os

from parity import show
from torch.utils.data import DataLoader, Dataset

with open("data.bin", "wb") as out:
    out.write(bytes(range(64)))


class Pages(Dataset):
    def __init__(self):
        self.file = open("data.bin", "rb")

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return os.pread(self.file.fileno(), 8, 8 * i)


print("start")
show(*DataLoader(Pages(), batch_size=4, num_workers=2))
