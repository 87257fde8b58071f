from parity import show
from torch.utils.data import DataLoader


class Hardest:
    def __init__(self, n):
        self.losses = [float(i % 4) for i in range(n)]

    def __len__(self):
        return 4

    def __iter__(self):
        order = sorted(range(len(self.losses)), key=lambda i: (-self.losses[i], i))
        yield from order[:4]


sampler = Hardest(10)
loader = DataLoader(list(range(10)), batch_size=2, sampler=sampler, num_workers=2)
for epoch in range(4):
    for batch in loader:
        show(batch)
        for i in batch.tolist():
            sampler.losses[i] /= 4
