# parity: raises=NotImplementedError
from torch.utils.data import DataLoader, Dataset


class Nothing(Dataset):
    def __len__(self):
        return 2


print("start")
for batch in DataLoader(Nothing(), num_workers=1):
    print(batch)
