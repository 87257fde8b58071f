import os
import subprocess
import sys

from parity import show
from torch.utils.data import DataLoader, Dataset


class Outputs(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        told = subprocess.run(["echo", str(i)], capture_output=True, text=True, check=True).stdout
        return told.strip(), os.popen(f"expr {i} + 1").read().strip()


show(*DataLoader(Outputs(), batch_size=2, num_workers=2))
