from parity import show
from torch.utils.data import DataLoader, Dataset, get_worker_info


class About(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        info = get_worker_info()
        return {
            "n": info.num_workers,
            "known": 0 <= info.id < info.num_workers,
            "same": info.dataset is self,
            "seed": type(info.seed).__name__,
            "fits": 0 <= info.seed < 2**63,
        }


show(get_worker_info())
for batch in DataLoader(About(), batch_size=4, num_workers=2):
    show(batch)
show(get_worker_info())
