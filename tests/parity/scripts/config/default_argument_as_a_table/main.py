import torch
from torch.utils.data import DataLoader
from parity import show
from labels import label_id

NAMES = ["dog", "cat", "bird", "cat", "dog", "fish"]
for n in sorted(set(NAMES)):
    label_id(n)


class D(torch.utils.data.Dataset):
    def __len__(self):
        return len(NAMES)

    def __getitem__(self, i):
        return label_id(NAMES[i])


for b in DataLoader(D(), batch_size=3, num_workers=2):
    show(b)
