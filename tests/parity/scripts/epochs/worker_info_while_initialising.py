import torch
from parity import show
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Sharded(Dataset):
    ready = None

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.ready


def initialise(worker):
    info = get_worker_info()
    equal = info.id == worker and torch.initial_seed() == info.seed
    info.dataset.ready = [info.num_workers, equal, torch.get_num_threads()]


for batch in DataLoader(Sharded(), batch_size=2, num_workers=2, worker_init_fn=initialise):
    show(batch)
