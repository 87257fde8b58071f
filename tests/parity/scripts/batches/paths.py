from pathlib import Path, PurePosixPath

from parity import show
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i, Path("data") / f"{i}.png", PurePosixPath("/x")


def collate(samples):
    return {"index": [s[0] for s in samples], "path": [s[1] for s in samples], "pure": samples[0][2]}


for batch in DataLoader(Files(), batch_size=2, num_workers=2, collate_fn=collate):
    show(batch, batch["path"][0].suffix)
