import sys
import types

from parity import show
from torch.utils.data import DataLoader, Dataset

settings = types.ModuleType("run_settings")
exec("size = 3\ndef grow(x):\n    return [x] * size", settings.__dict__)
sys.modules["run_settings"] = settings


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        import run_settings

        return run_settings.grow(i)


for batch in DataLoader(Numbers(), batch_size=4, num_workers=2):
    show(batch)
