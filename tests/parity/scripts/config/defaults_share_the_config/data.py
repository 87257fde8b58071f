import config
from config import CFG
from torch.utils.data import Dataset


class Images(Dataset):
    shared = CFG

    def __init__(self, cfg=CFG["nested"]):
        self.cfg = cfg

    def __len__(self):
        return 4

    def size(self, cfg=CFG):
        return cfg["size"]

    def __getitem__(self, i):
        same = self.shared is CFG and config.CFG is CFG and self.cfg is CFG["nested"]
        return i, self.size(), self.cfg["depth"], same
