import socket
import time

from parity import show
from torch.utils.data import DataLoader, Dataset

socket.setdefaulttimeout(0.1)


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        time.sleep(0.2)
        return str(socket.getdefaulttimeout())


loader = DataLoader(Slow(), batch_size=2, num_workers=1, persistent_workers=True)
for _ in range(2):
    show(*loader)
    time.sleep(0.3)
