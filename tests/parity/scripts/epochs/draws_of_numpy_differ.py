import numpy as np
from parity import show
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return np.random.rand(3)


loader = DataLoader(Noise(), batch_size=2, num_workers=2)
first = np.concatenate([batch.numpy() for batch in loader])
second = np.concatenate([batch.numpy() for batch in loader])
show(first.shape, len(np.unique(first)), len(np.unique(np.concatenate([first, second]))))
