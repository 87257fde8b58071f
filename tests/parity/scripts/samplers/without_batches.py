import torch
from parity import show
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler


class Bulk(Dataset):
    def __init__(self):
        self.x = torch.arange(10.0).view(10, 1)

    def __len__(self):
        return 10

    def __getitem__(self, indices):
        return self.x[indices]


data = Bulk()
sampler = BatchSampler(SequentialSampler(data), 4, drop_last=False)
show(*DataLoader(data, sampler=sampler, batch_size=None, num_workers=2))
show(len(DataLoader(data, batch_size=None, num_workers=2)), *DataLoader(data, batch_size=None, num_workers=2))
