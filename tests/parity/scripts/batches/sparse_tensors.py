import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Sparse(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.eye(3).mul(i).to_sparse()


def stack(samples):
    return torch.stack(samples), samples[0].to_dense().to_sparse_csr()


for batch in DataLoader(Sparse(), batch_size=2, num_workers=1, collate_fn=stack):
    show(batch)
