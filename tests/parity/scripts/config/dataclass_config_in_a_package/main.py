import dataclasses

from parity import show
from pipeline import config
from pipeline.data import Tokens
from torch.utils.data import DataLoader

config.current = dataclasses.replace(config.current, length=3, special=("<s>", "</s>"))
for batch in DataLoader(Tokens(), batch_size=2, num_workers=2):
    show(batch)
