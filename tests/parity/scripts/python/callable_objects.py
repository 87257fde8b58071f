import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset


class Collate:
    def __init__(self, noise):
        self.noise, self.calls = noise, 0

    def __call__(self, samples):
        self.calls += 1
        return torch.stack([x for (x,) in samples]) + self.noise

    def __repr__(self):
        return f"Collate({self.noise}, {self.calls})"


class Initialise:
    def __call__(self, worker):
        torch.set_num_threads(1)


collate = Collate(10)
loader = DataLoader(
    TensorDataset(torch.arange(4)), 2, num_workers=2, collate_fn=collate, worker_init_fn=Initialise()
)
show(*loader)
collate.noise = 20
show(*loader)
show(collate)
