# parity: raises=KeyError
from torch.utils.data import DataLoader, Dataset


class Table(Dataset):
    rows = {0: "a", 1: "b", 3: "d"}

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.rows[i]


for batch in DataLoader(Table(), batch_size=1, num_workers=2):
    print(batch)
