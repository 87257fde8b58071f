from config import CFG
from data import Images
from parity import show
from torch.utils.data import DataLoader

CFG["size"] = 7
CFG["nested"]["depth"] = 3
for batch in DataLoader(Images(), batch_size=2, num_workers=2):
    show(batch)
