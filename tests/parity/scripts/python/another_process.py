import os
import threading

from parity import show
from torch.utils.data import DataLoader, Dataset, get_worker_info

main = os.getpid()


class Names(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        in_main_thread = threading.current_thread() is threading.main_thread()
        return os.getpid() != main, in_main_thread, get_worker_info() is not None


show(*DataLoader(Names(), batch_size=2, num_workers=1))
