from parity import show
from torch.utils.data import ChainDataset, DataLoader, IterableDataset


class Lines(IterableDataset):
    def __init__(self, start, stop):
        self.start, self.stop = start, stop

    def __iter__(self):
        return iter(range(self.start, self.stop))


loader = DataLoader(Lines(0, 7), batch_size=3, num_workers=0)
for epoch in range(2):
    show(*loader)
show(*DataLoader(ChainDataset([Lines(0, 3), Lines(10, 12)]), batch_size=2, num_workers=0))
show(*DataLoader(Lines(0, 3), batch_size=None, num_workers=0))
