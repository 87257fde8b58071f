from parity import show
from torch.utils.data import DataLoader, Dataset


class Late(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        return helper(i)


loader = DataLoader(Late(), batch_size=3, num_workers=2)


def helper(i):
    return i + 1


show(*loader)


def helper(i):
    return "again"


show(*loader)
