from parity import show
from torch.utils.data import DataLoader

from . import settings
from .data.images import Images

if __name__ == "__main__":
    settings.SIZE = 3
    for batch in DataLoader(Images(), batch_size=2, num_workers=2):
        show(batch)
