import tempfile
from pathlib import Path

from parity import show
from torch.utils.data import DataLoader, Dataset


class Files(Dataset):
    def __init__(self, folder):
        self.files = sorted(Path(folder).iterdir())

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        return self.files[i].name, self.files[i].read_bytes()


with tempfile.TemporaryDirectory() as folder:
    for i in range(4):
        (Path(folder) / f"{i}.bin").write_bytes(bytes([i, i]))
    show(*DataLoader(Files(folder), batch_size=2, num_workers=2))
