import signal
import time

from parity import show
from torch.utils.data import DataLoader, Dataset


class Late(Exception):
    pass


def on_alarm(number, frame):
    raise Late


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        signal.signal(signal.SIGALRM, on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        try:
            time.sleep(20 if i == 2 else 0)
            return i
        except Late:
            return -1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)


show(*DataLoader(Slow(), batch_size=2, num_workers=2))
