import lazy
from parity import show
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return lazy.doubled_7 + i


lazy.calls.append("main")
for batch in DataLoader(Numbers(), batch_size=2, num_workers=2):
    show(batch)
