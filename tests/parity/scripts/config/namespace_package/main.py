from parity import show
from spaces.audio import gain
from spaces.vision.crop import Crops
from torch.utils.data import DataLoader

gain.level = 4
for batch in DataLoader(Crops(), batch_size=2, num_workers=2):
    show(batch)
