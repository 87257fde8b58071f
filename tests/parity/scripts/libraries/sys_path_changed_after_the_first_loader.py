import os
import sys

from parity import show
from torch.utils.data import DataLoader, Dataset


class Plugged(Dataset):
    def __init__(self, name):
        self.name = name

    def __len__(self):
        return 2

    def __getitem__(self, i):
        return __import__(self.name).NUMBER + i


for k, name in enumerate(("plugin_a", "plugin_b")):
    os.mkdir(name + "_folder")
    with open(f"{name}_folder/{name}.py", "w") as file:
        file.write(f"NUMBER = {k * 10}")
    sys.path.append(os.path.abspath(name + "_folder"))
    for batch in DataLoader(Plugged(name), batch_size=2, num_workers=2):
        show(batch)
