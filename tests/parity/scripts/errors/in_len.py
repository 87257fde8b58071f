# parity: raises=NotImplementedError
from torch.utils.data import DataLoader, Dataset


class NoLength(Dataset):
    def __len__(self):
        raise NotImplementedError

    def __getitem__(self, i):
        return i


print("start")
DataLoader(NoLength(), batch_size=2, num_workers=2, shuffle=True)
for batch in DataLoader(NoLength(), batch_size=2, num_workers=2):
    print(batch)
