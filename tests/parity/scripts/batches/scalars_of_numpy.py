import numpy as np
from parity import show
from torch.utils.data import DataLoader, Dataset


class Scalars(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.float32(i / 3), np.int16(i), np.bool_(i % 2), np.float64(i), np.uint8(i), np.array(i)


for batch in DataLoader(Scalars(), batch_size=2, num_workers=2):
    show(batch)
for sample in DataLoader(Scalars(), batch_size=None, num_workers=2):
    show(sample)
