# parity: raises=ValueError
from torch.utils.data import DataLoader, Dataset


class Rows(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        try:
            return {}["price"]
        except KeyError as error:
            raise ValueError("no price") from error


print("start")
for batch in DataLoader(Rows(), num_workers=1):
    print(batch)
