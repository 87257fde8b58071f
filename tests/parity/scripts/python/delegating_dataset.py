from parity import show
from torch.utils.data import DataLoader, Dataset


class Inner(Dataset):
    classes = ["cat", "dog"]

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i, self.classes[i % 2]


class Wrapper(Dataset):
    def __init__(self, inner):
        self.inner = inner

    def __len__(self):
        return len(self.inner)

    def __getitem__(self, i):
        return self.inner[i] + (self.extra(),)

    def extra(self):
        return len(self.classes)

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)


show(*DataLoader(Wrapper(Wrapper(Inner())), batch_size=2, num_workers=2))
