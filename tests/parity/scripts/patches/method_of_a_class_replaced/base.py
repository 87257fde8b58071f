from torch.utils.data import Dataset


class Numbers(Dataset):
    factor = 1

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i * self.factor
