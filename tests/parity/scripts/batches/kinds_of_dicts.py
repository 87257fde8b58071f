from collections import Counter, OrderedDict, defaultdict

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Samples(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return [
            OrderedDict(b=i, a=torch.tensor(i)),
            defaultdict(list, x=i),
            Counter({"k": i + 1}),
        ]


for batch in DataLoader(Samples(), batch_size=2, num_workers=2):
    show(batch)
    show(batch[1].default_factory)
