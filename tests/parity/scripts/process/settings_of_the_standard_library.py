import csv
import tempfile

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

csv.register_dialect("pipes", delimiter="|", quotechar="'")
tempfile.tempdir = "/var/tmp"
torch.set_flush_denormal(True)


class Lines(Dataset):
    lines = ("1|'a|b'|2", "3|c|4")

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, i):
        fields = next(csv.reader([self.lines[i]], dialect="pipes"))
        small = torch.tensor(1e-38) * torch.tensor(0.1)
        return fields, tempfile.gettempdir(), float(small)


show(*DataLoader(Lines(), batch_size=1, num_workers=2))
