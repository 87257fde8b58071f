import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Views(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        x = torch.arange(24.0).view(2, 3, 4) + i
        return x.transpose(0, 2), x[:, 1], x.expand(2, 2, 3, 4), x[..., 0].t(), torch.tensor(3.0).expand(2)


for batch in DataLoader(Views(), batch_size=2, num_workers=2):
    show(batch)
for batch in DataLoader(Views(), batch_size=None, num_workers=2):
    show(batch, [x.sum() for x in batch])
