import json
from pathlib import Path

from parity import show
from torch.utils.data import DataLoader, Dataset

CONFIG = json.loads((Path(__file__).parent / "config.json").read_text())


class Words(Dataset):
    def __len__(self):
        return len(CONFIG["words"])

    def __getitem__(self, i):
        return CONFIG["words"][i] * CONFIG["times"]


for batch in DataLoader(Words(), batch_size=2, num_workers=2):
    show(batch)
