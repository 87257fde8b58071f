import os

from torch.utils.data import Dataset


class Reader(Dataset):
    def __init__(self, folder):
        self.folder = folder
        self.names = sorted(os.listdir(folder))

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        beside = os.path.join(os.path.dirname(__file__), "data", "a.txt")
        with open(os.path.join(self.folder, self.names[i])) as file, open(beside) as title:
            return file.read().strip(), title.read().strip()
