import inspect

from parity import show
from torch.utils.data import DataLoader, Dataset


def step(x):
    return x + 1  # a comment


class Sources(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, i):
        return inspect.getsource(step), __name__, step.__module__, __file__.endswith(".py")


show(*DataLoader(Sources(), num_workers=1))
