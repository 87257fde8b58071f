# parity: raises=RecursionError
from torch.utils.data import DataLoader, Dataset


class Endless(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return self[i]


print("start")
for batch in DataLoader(Endless(), num_workers=1):
    print(batch)
