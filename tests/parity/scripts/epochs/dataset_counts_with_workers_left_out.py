from parity import show
from torch.utils.data import DataLoader, Dataset


class Counting(Dataset):
    calls = 0

    def __len__(self):
        return 4

    def __getitem__(self, i):
        self.calls += 1
        return i


dataset = Counting()
for batch in DataLoader(dataset, batch_size=2):
    show(batch)
show(dataset.calls)
