# parity: raises=OverflowError
from torch.utils.data import DataLoader, Dataset


class Many(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i

    def __getitems__(self, indices):
        if 3 in indices:
            raise OverflowError(str(indices))
        return [self[i] for i in indices]


for batch in DataLoader(Many(), batch_size=2, num_workers=2):
    print(batch)
