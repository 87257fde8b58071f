import os

from parity import show
from torch.utils.data import DataLoader, Dataset


class Cached(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        path = f"cache-{i}.txt"
        if os.path.exists(path):
            return open(path).read()
        with open(path, "w") as file:
            file.write("from the cache")
        return "made"


loader = DataLoader(Cached(), batch_size=3, num_workers=2)
show(*loader)
show(*loader)
show(sorted(name for name in os.listdir(".") if name.startswith("cache")))
