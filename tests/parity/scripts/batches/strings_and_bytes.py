from parity import show
from torch.utils.data import DataLoader

data = ["plain", "ünïcode \N{GRINNING FACE}", "", "nul\0nul", b"bytes\xff", b"", "long" * 5000]
show(*DataLoader(data, batch_size=4, num_workers=2))
show(*DataLoader(data, batch_size=None, num_workers=2))
show(*DataLoader(data, batch_size=3, num_workers=1, collate_fn="|".join if False else tuple))
