import torch
from parity import show
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(0)


class Embedded(Dataset):
    def __init__(self):
        self.model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.BatchNorm1d(3)).eval()

    def __len__(self):
        return 4

    @torch.no_grad()
    def __getitem__(self, i):
        return (self.model(torch.full((1, 4), float(i))) * 1000).round()


show(*DataLoader(Embedded(), batch_size=2, num_workers=2))
