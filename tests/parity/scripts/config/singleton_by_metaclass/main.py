from data import Sized
from parity import show
from singleton import Config
from torch.utils.data import DataLoader

Config().size = 6
show(Config() is Config())
for batch in DataLoader(Sized(), batch_size=2, num_workers=2):
    show(batch)
