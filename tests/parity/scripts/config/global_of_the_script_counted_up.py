from parity import show
from torch.utils.data import DataLoader, Dataset

epoch = 0


class Numbers(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return 10 * epoch + i


loader = DataLoader(Numbers(), batch_size=4, num_workers=2)
for epoch in range(3):
    for batch in loader:
        show(batch)
