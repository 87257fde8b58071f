import multiprocessing
import os
import threading

from parity import show
from torch.utils.data import DataLoader, Dataset

main = os.getpid()


class Names(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        elsewhere = os.getpid() != main
        return elsewhere, threading.active_count() >= 1, multiprocessing.parent_process() is not None


show(*DataLoader(Names(), batch_size=2, num_workers=1))
