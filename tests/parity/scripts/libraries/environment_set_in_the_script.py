import os

from parity import show
from torch.utils.data import DataLoader, Dataset

os.environ["DATA_ROOT"] = "/data/one"


class StageResult(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return os.environ.get("DATA_ROOT", "nowhere"), os.getenv("DATA_ROOT", "unset")


loader = DataLoader(StageResult(), batch_size=2, num_workers=1)
show(*loader)
os.environ["DATA_ROOT"] = "/data/two"
show(*loader)
del os.environ["DATA_ROOT"]
show(*loader)
