# parity: alone
from parity import show
from torch.utils.data import DataLoader, Dataset

opened = []


class Opens(Dataset):
    handle = None

    def __len__(self):
        return 6

    def __getitem__(self, i):
        if self.handle is None:
            self.handle = "open"
            opened.append(i)
        return len(opened)


loader = DataLoader(Opens(), batch_size=3, num_workers=1)
for epoch in range(2):
    show(*loader)
show(opened)
