import json

from parity import show
from torch.utils.data import DataLoader, Dataset

plain = json.loads


def with_default(text, **options):
    return {"weight": 1.0, **plain(text, **options)}


json.loads = with_default


class Lines(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return json.loads('{"label": %d}' % i)


for batch in DataLoader(Lines(), batch_size=2, num_workers=2):
    show(batch)
