# parity: raises=LookupError
from torch.utils.data import DataLoader, Sampler


class Broken(Sampler):
    def __len__(self):
        return 10

    def __iter__(self):
        yield from range(2)
        raise LookupError("no more")


print("start")
for batch in DataLoader(list(range(10)), batch_size=2, sampler=Broken(), num_workers=2):
    pass
