from parity import show
from torch.utils.data import DataLoader, Dataset


def scaled_by(factor):
    calls = []

    def scale(x):
        calls.append(x)
        return x * factor

    return scale


class Mapped(Dataset):
    def __init__(self, data, *functions):
        self.data, self.functions = data, functions

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        x = self.data[i]
        for f in self.functions:
            x = f(x)
        return x


offset = 5
data = Mapped([1, 2, 3, 4], scaled_by(3), lambda x: x + offset, {6: 60}.get if False else str)
show(*DataLoader(data, batch_size=2, num_workers=2, collate_fn=lambda batch: batch[::-1]))
