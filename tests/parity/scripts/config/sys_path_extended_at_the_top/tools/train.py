import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "..", "project"))

import common
from dataset.numbers import Numbers
from parity import show
from torch.utils.data import DataLoader

common.options["base"] = 1000
for batch in DataLoader(Numbers(), batch_size=2, num_workers=2):
    show(batch)
