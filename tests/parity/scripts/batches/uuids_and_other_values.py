import ipaddress
import uuid
from types import SimpleNamespace

from parity import show
from torch.utils.data import DataLoader, Dataset


class Values(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return {
            "uuid": uuid.UUID(int=i),
            "address": ipaddress.ip_address("10.0.0.1") + i,
            "space": SimpleNamespace(x=i),
            "set": {i, "x"},
            "frozen": frozenset([i]),
            "range": range(i, 9),
            "slice": slice(i),
            "array": bytearray([i, 2]),
            "type": int,
        }


for batch in DataLoader(Values(), batch_size=2, num_workers=2, collate_fn=list):
    show(batch)
