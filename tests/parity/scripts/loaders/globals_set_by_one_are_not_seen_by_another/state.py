from torch.utils.data import Dataset

seen = []


class Writer(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        seen.append(i)
        Reader.note = "written"
        return i


class Reader(Dataset):
    note = "empty"

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return len(seen), self.note
