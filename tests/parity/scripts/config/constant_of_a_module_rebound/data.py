import constants
from torch.utils.data import Dataset


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i * constants.FACTOR
