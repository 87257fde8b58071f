from parity import show
from torch.utils.data import DataLoader

show(*DataLoader(list(range(6)), batch_size=3, num_workers=2, timeout=25))
