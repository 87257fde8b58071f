import datetime as dt

from parity import show
from torch.utils.data import DataLoader, Dataset

zone = dt.timezone(dt.timedelta(hours=2), "here")


class Days(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        start = dt.datetime(2024, 2, 28, 12, 30, tzinfo=zone)
        return start + dt.timedelta(days=i), dt.date(2024, 1, 1 + i), dt.time(i), dt.timedelta(seconds=i)


for batch in DataLoader(Days(), batch_size=2, num_workers=2, collate_fn=list):
    show(batch)
