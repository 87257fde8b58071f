from parity import show
from torch.utils.data import DataLoader, Dataset


class Positive:
    def __set_name__(self, owner, name):
        self.name = "_" + name

    def __get__(self, instance, owner=None):
        return self if instance is None else getattr(instance, self.name)

    def __set__(self, instance, value):
        if value <= 0:
            raise ValueError(value)
        setattr(instance, self.name, value)


class Crops(Dataset):
    size = Positive()

    def __init__(self, size):
        self.size = size

    @property
    def area(self):
        return self.size**2

    @area.setter
    def area(self, value):
        self.size = int(value**0.5)

    @classmethod
    def small(cls):
        return cls(2)

    @staticmethod
    def double(x):
        return 2 * x

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return self.double(self.area) + i


crops = Crops.small()
loader = DataLoader(crops, batch_size=3, num_workers=2)
show(*loader)
crops.area = 25
show(*loader)
