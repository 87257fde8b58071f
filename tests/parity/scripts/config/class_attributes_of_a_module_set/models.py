from torch.utils.data import Dataset


class Base(Dataset):
    size = 1
    hooks = []

    def __len__(self):
        return 4


class Child(Base):
    def __getitem__(self, i):
        return i * self.size, len(self.hooks)
