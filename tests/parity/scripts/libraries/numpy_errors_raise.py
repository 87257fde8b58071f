import numpy as np
from torch.utils.data import DataLoader, Dataset

# parity: raises=FloatingPointError
np.seterr(all="raise")


class Quotients(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return np.float64(1.0) / np.float64(i)


print("start")
for batch in DataLoader(Quotients(), batch_size=2, num_workers=1):
    print(batch)
