from parity import show
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return self.rows[i]


dataset = Rows(list(range(9)))
loader = DataLoader(dataset, batch_size=4, num_workers=2)
show(*loader)
dataset.rows = [r for r in dataset.rows if r % 2]
show(len(loader), *loader)
