# parity: alone
import os
import signal

from torch.utils.data import DataLoader, Dataset


class Killed(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        os.kill(os.getpid(), signal.SIGKILL)


try:
    for batch in DataLoader(Killed(), batch_size=2, num_workers=1):
        print("a batch")
except RuntimeError as error:
    print("a worker was killed")
