import gc
import weakref

from parity import show
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return i


def use():
    dataset = Numbers()
    loader = DataLoader(dataset, batch_size=2, num_workers=2)
    show(*loader)
    next(iter(loader))
    return weakref.ref(loader), weakref.ref(dataset)


refs = use()
gc.collect()
show([ref() is None for ref in refs])
