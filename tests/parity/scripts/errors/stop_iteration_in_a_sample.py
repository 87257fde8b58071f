from parity import show
from torch.utils.data import DataLoader, Dataset


class Ends(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return next(iter(range(i, 5)))


for epoch in range(2):
    show(*DataLoader(Ends(), batch_size=2, num_workers=1))
print("over")
