import plugins.crop
import plugins.flip
from data import Images
from parity import show
from torch.utils.data import DataLoader

for names in (["flip"], ["flip", "crop"]):
    for batch in DataLoader(Images(names), batch_size=2, num_workers=2):
        show(batch)
