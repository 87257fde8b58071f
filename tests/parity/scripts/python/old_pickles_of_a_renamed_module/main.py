import pickle
import sys
from pathlib import Path

import records
import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

sys.modules["archive"] = records  # what it was called when the files were written
sys.modules["old_script"] = sys.modules["__main__"]


class Label:
    def __init__(self, name):
        self.name = name


def old(obj, now, then):
    return pickle.dumps(obj, protocol=0).replace(now.encode(), then.encode())


for i in range(4):
    Path(f"{i}.record").write_bytes(old(records.Record(i), "records", "archive"))
    Path(f"{i}.label").write_bytes(old(Label("cat" if i % 2 else "dog"), "__main__", "old_script"))


class Old(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        record = pickle.loads(Path(f"{i}.record").read_bytes())
        label = pickle.loads(Path(f"{i}.label").read_bytes())
        return torch.tensor(record.value), label.name, type(record).__module__


for batch in DataLoader(Old(), batch_size=2, num_workers=2):
    show(batch)
