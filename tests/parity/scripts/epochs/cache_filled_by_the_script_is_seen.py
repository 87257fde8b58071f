from parity import show
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __init__(self):
        self.cache = {}

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return i in self.cache


dataset = Cached()
loader = DataLoader(dataset, batch_size=6, num_workers=2)
for epoch in range(3):
    show(*loader)
    dataset.cache[epoch] = "known"
