from parity import show
from torch.utils.data import DataLoader, Sampler


class Remembering(Sampler):
    def __init__(self, n):
        self.n, self.epochs = n, 0

    def __len__(self):
        return self.n

    def __iter__(self):
        self.epochs += 1
        return iter([(i + self.epochs) % self.n for i in range(self.n)])


sampler = Remembering(6)
loader = DataLoader(list(range(6)), batch_size=2, sampler=sampler, num_workers=2)
for epoch in range(3):
    for batch in loader:
        show(sampler.epochs, batch)
        break
show(*loader)
