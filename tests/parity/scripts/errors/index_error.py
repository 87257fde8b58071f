# parity: raises=IndexError
from torch.utils.data import DataLoader, Dataset


class TooShort(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return [10, 20, 30][i]


for batch in DataLoader(TooShort(), batch_size=2, num_workers=2):
    print(batch)
