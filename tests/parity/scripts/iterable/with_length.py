from parity import show
from torch.utils.data import DataLoader, IterableDataset


class Counted(IterableDataset):
    def __len__(self):
        return 5

    def __iter__(self):
        return iter(range(5))


loader = DataLoader(Counted(), batch_size=2, num_workers=0, drop_last=True)
show(len(loader), *loader)
try:
    DataLoader(Counted(), shuffle=True, num_workers=0)
except ValueError:
    print("ValueError")
