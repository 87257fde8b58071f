# parity: alone
from parity import show
from torch.utils.data import DataLoader, Dataset


class Counting(Dataset):
    def __init__(self):
        self.calls = 0

    def __len__(self):
        return 4

    def __getitem__(self, i):
        self.calls += 1
        return self.calls


loader = DataLoader(Counting(), batch_size=2, num_workers=1, persistent_workers=True)
for epoch in range(3):
    show(*loader)
