import gzip
import json
import linecache

from parity import show
from torch.utils.data import DataLoader, Dataset

with gzip.open("a.jsonl.gz", "wt") as packed, open("a.jsonl", "w") as plain:
    for i in range(6):
        for file in (packed, plain):
            file.write(json.dumps({"text": "w" * i, "n": i}) + "\n")


class Lines(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        with gzip.open("a.jsonl.gz", "rt") as file:
            packed = json.loads(file.readlines()[i])
        return packed == json.loads(linecache.getline("a.jsonl", i + 1)), packed


show(*DataLoader(Lines(), batch_size=3, num_workers=2))
