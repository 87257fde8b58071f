import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Leaves(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return torch.full((2,), float(i)).requires_grad_()


def detach(samples):
    return torch.stack([s.detach() for s in samples])


for batch in DataLoader(Leaves(), batch_size=2, num_workers=1, collate_fn=detach):
    batch.requires_grad_()
    (batch * 3).sum().backward()
    show(batch.grad)
