import io
import tarfile

from parity import show
from torch.utils.data import DataLoader, Dataset

with tarfile.open("all.tar", "w") as tar:
    for i in range(5):
        info = tarfile.TarInfo(f"s/{i}.bin")
        info.size = i + 1
        tar.addfile(info, io.BytesIO(bytes([i]) * (i + 1)))


class Members(Dataset):
    def __init__(self, path):
        self.path = path
        with tarfile.open(path) as tar:
            self.members = [(m.name, m.offset_data, m.size) for m in tar]

    def __len__(self):
        return len(self.members)

    def __getitem__(self, i):
        name, offset, size = self.members[i]
        with open(self.path, "rb") as file:
            file.seek(offset)
            return name, file.read(size)


show(*DataLoader(Members("all.tar"), batch_size=5, num_workers=2))
