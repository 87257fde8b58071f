import os

from parity import show
from torch.utils.data import DataLoader, Dataset


class Moves(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        os.chdir("/")
        os.environ["MOVED"] = "yes"
        return os.getcwd()


class Stays(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return os.path.exists("here.txt"), os.environ.get("MOVED", "no")


open("here.txt", "w").close()
show(*DataLoader(Moves(), batch_size=2, num_workers=1))
show(*DataLoader(Stays(), batch_size=2, num_workers=1))
show(*DataLoader(Moves(), batch_size=2, num_workers=1))
