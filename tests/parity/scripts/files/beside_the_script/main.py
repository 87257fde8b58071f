import os

from parity import show
from reader import Reader
from torch.utils.data import DataLoader

HERE = os.path.dirname(os.path.abspath(__file__))
for batch in DataLoader(Reader(os.path.join(HERE, "data")), batch_size=2, num_workers=2):
    show(batch)
