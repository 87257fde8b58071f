from torch.utils.data import Dataset


class Decoder:
    def decode(self, i):
        return i


class Videos(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return Decoder().decode(i)
