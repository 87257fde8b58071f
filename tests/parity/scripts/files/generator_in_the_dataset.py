from parity import show
from torch.utils.data import DataLoader, Dataset


class Stream(Dataset):
    def __init__(self):
        self.numbers = (i * i for i in range(100))

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return next(self.numbers)


print("start")
show(*DataLoader(Stream(), batch_size=2, num_workers=1))
