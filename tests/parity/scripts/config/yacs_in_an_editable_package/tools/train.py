from parity import show
from torch.utils.data import DataLoader
from yourdet.config import cfg
from yourdet.data import build_dataset

cfg.merge({"INPUT": {"SIZE": 512, "FLIP": True}})
cfg.freeze()
loader = DataLoader(build_dataset("squares", 4), batch_size=2, num_workers=2)
for images, flipped in loader:
    show(images.shape, flipped)
