import warnings

from parity import show
from torch.utils.data import DataLoader, Dataset


class Warned(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            warnings.warn(f"sample {i}")
        return [str(w.message) for w in caught]


for batch in DataLoader(Warned(), batch_size=2, num_workers=2):
    show(batch)
