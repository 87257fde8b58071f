from parity import show
from torch.utils.data import DataLoader, IterableDataset, get_worker_info


class Shards(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        return iter(range(info.id, 12, info.num_workers))


print("start")
show(*DataLoader(Shards(), batch_size=3, num_workers=2))
