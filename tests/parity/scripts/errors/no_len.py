# parity: raises=TypeError
from torch.utils.data import DataLoader, Dataset


class NoLength(Dataset):
    def __getitem__(self, i):
        return i


for batch in DataLoader(NoLength(), batch_size=2, num_workers=2, sampler=[3, 1, 2]):
    print(batch)
for batch in DataLoader(NoLength(), batch_size=2, num_workers=2):
    print(batch)
