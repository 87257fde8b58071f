import rules
from torch.utils.data import Dataset


class Ruled(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return rules.cut(i * 10)
