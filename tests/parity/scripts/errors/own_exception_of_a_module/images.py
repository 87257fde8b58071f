import errors
from torch.utils.data import Dataset


class Images(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 4:
            raise errors.BadImage("black")
        return i
