from parity import show
from torch.utils.data import DataLoader, Dataset


class Ends(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return next(iter(range(i, 5)))


show(*DataLoader(Ends(), batch_size=2, num_workers=0))
print("over")
