# parity: alone
# parity: raises=ValueError
from torch.utils.data import DataLoader, Dataset


class Broken(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5:
            raise ValueError(i)
        return i


for batch in DataLoader(Broken(), batch_size=2, num_workers=1):
    print(batch)
