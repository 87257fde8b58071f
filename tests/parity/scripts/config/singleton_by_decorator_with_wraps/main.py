from torch.utils.data import DataLoader
from parity import show
from config import Config
from data import Images

cfg = Config()
cfg.size, cfg.scale = 6, 0.5
for b in DataLoader(Images(), batch_size=4, num_workers=2):
    show(b)
