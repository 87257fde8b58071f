from torch.utils.data import Dataset

index = {"<unknown>": 0}


def add(text):
    for word in text.split():
        index.setdefault(word, len(index))


class Text(Dataset):
    def __init__(self, lines):
        self.lines = lines

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        return [index.get(word, 0) for word in self.lines[i].split()]
