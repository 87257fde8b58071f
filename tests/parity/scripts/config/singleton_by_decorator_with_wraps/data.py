import torch
from config import Config


class Images(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        cfg = Config()
        return torch.full((cfg.size,), float(i)) * cfg.scale
