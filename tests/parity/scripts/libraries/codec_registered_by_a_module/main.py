import rot
from parity import show
from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return b"\xff%d".replace(b"%d", b"%d" % i).decode("utf-8", "count")


for batch in DataLoader(Texts(), batch_size=2, num_workers=1):
    show(batch)
