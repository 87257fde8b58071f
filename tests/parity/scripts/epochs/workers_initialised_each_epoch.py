import os

from parity import show
from torch.utils.data import DataLoader, Dataset


def initialise(worker):
    with open(f"init-{worker}", "a") as file:
        file.write(f"{os.getpid()}\n")


class Numbers(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i


loader = DataLoader(Numbers(), batch_size=2, num_workers=2, worker_init_fn=initialise)
for epoch in range(3):
    show(*loader)
files = sorted(name for name in os.listdir(".") if name.startswith("init-"))
show(files, [len(open(name).readlines()) for name in files], [len(set(open(name))) for name in files])
