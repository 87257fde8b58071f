import locale

from parity import show
from torch.utils.data import DataLoader, Dataset

locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")


class Numbers(Dataset):
    def __len__(self):
        return 1

    def __getitem__(self, i):
        return locale.setlocale(locale.LC_NUMERIC), locale.format_string("%.2f", 1.5)


for batch in DataLoader(Numbers(), num_workers=1):
    show(batch)
