import zipfile

from parity import show
from torch.utils.data import DataLoader, Dataset

with zipfile.ZipFile("texts.zip", "w", zipfile.ZIP_DEFLATED) as archive:
    for i in range(6):
        archive.writestr(f"{i}.txt", "t" * i)


class Texts(Dataset):
    archive = None

    def __init__(self):
        with zipfile.ZipFile("texts.zip") as archive:
            self.names = archive.namelist()

    def __len__(self):
        return len(self.names)

    def __getitem__(self, i):
        if self.archive is None:
            self.archive = zipfile.ZipFile("texts.zip")
        return self.names[i], self.archive.read(self.names[i])


show(*DataLoader(Texts(), batch_size=3, num_workers=2))
