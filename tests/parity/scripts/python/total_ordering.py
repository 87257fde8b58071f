from functools import total_ordering, wraps

from parity import show
from torch.utils.data import DataLoader, Dataset


@total_ordering
class Version:
    def __init__(self, text):
        self.parts = tuple(map(int, text.split(".")))

    def __eq__(self, other):
        return self.parts == other.parts

    def __lt__(self, other):
        return self.parts < other.parts

    __hash__ = None


def checked(f):
    @wraps(f)
    def inner(self, i):
        assert 0 <= i
        return f(self, i)

    return inner


class Versions(Dataset):
    def __init__(self, *texts):
        self.versions = sorted(map(Version, texts))

    def __len__(self):
        return len(self.versions)

    @checked
    def __getitem__(self, i):
        return self.versions[i].parts, self.versions[i] >= Version("1.5")


show(*DataLoader(Versions("1.10", "1.2", "2.0"), batch_size=3, num_workers=2))
