import os
import signal

from parity import show
from torch.utils.data import DataLoader, Dataset

seen = []
signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))


class Signals(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGUSR1)
        return len(seen)


show(*DataLoader(Signals(), batch_size=2, num_workers=1))
