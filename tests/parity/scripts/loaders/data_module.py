import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset, random_split


class DataModule:
    def __init__(self, batch_size):
        self.batch_size = batch_size

    def setup(self):
        everything = TensorDataset(torch.arange(20).float(), torch.arange(20) % 3)
        generator = torch.Generator().manual_seed(1)
        self.train, self.val = random_split(everything, [15, 5], generator=generator)

    def train_dataloader(self):
        return DataLoader(self.train, self.batch_size, num_workers=2, drop_last=True)

    def val_dataloader(self):
        return DataLoader(self.val, self.batch_size, num_workers=1)


data = DataModule(4)
data.setup()
for epoch in range(2):
    show(*data.train_dataloader())
    show(*data.val_dataloader())
