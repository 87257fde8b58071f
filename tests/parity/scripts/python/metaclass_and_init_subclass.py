from parity import show
from torch.utils.data import DataLoader, Dataset


class Registered(type):
    kinds = {}

    def __new__(mcs, name, bases, namespace):
        kind = super().__new__(mcs, name, bases, namespace)
        mcs.kinds[name] = kind
        return kind


class Task(metaclass=Registered):
    names = []

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        Task.names.append(cls.__name__)


class Add(Task):
    def __call__(self, x):
        return x + 1


class Negate(Task):
    def __call__(self, x):
        return -x


class Tasks(Dataset):
    def __len__(self):
        return len(Task.names)

    def __getitem__(self, i):
        return Task.names[i], Registered.kinds[Task.names[i]]()(10)


show(*DataLoader(Tasks(), batch_size=4, num_workers=2))
