from data import Images
from parity import show
from settings import settings
from torch.utils.data import DataLoader

settings.size = 5
settings.names.append("cat")
loader = DataLoader(Images(), batch_size=2, num_workers=2)
for epoch in range(2):
    for batch in loader:
        show(batch)
    settings.size += 1
