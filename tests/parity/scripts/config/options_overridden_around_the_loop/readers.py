from options import options
from torch.utils.data import Dataset


class Readers(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return options["mode"], options["level"] + i
