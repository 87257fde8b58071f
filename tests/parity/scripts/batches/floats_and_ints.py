from parity import show
from torch.utils.data import DataLoader, Dataset


class Mixed(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i, i / 7, i > 1, [i, [float(i)]], (i,), (), [], {}


for batch in DataLoader(Mixed(), batch_size=2, num_workers=2):
    show(batch)
