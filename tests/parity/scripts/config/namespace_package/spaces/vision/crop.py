from spaces.audio import gain
from torch.utils.data import Dataset


class Crops(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i * gain.level
