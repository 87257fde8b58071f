# parity: raises=AssertionError
from torch.utils.data import DataLoader, Dataset


class Checked(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        assert i < 3, f"sample {i}"
        return i


for batch in DataLoader(Checked(), batch_size=1, num_workers=2):
    print(batch)
