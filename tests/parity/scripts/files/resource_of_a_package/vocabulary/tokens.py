from importlib import resources

from torch.utils.data import Dataset


class Tokens(Dataset):
    def __init__(self, texts):
        self.texts = texts

    def __len__(self):
        return len(self.texts)

    def __getitem__(self, i):
        words = resources.files(__package__).joinpath("words.txt").read_text().split()
        return [words.index(word) for word in self.texts[i].split()]
