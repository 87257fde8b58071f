from options import options, override
from parity import show
from readers import Readers
from torch.utils.data import DataLoader

loader = DataLoader(Readers(), batch_size=2, num_workers=2)
show(*loader)
with override(mode="strict", level=3):
    show(*loader)
show(*loader, options)
