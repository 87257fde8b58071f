# parity: alone
import sys

from torch.utils.data import DataLoader, Dataset


class Exits(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        sys.exit(3)


try:
    for batch in DataLoader(Exits(), batch_size=2, num_workers=1):
        print(batch)
except RuntimeError as error:
    print("a worker ended")
