import torch
from torch.utils.data import DataLoader, Dataset


class cfg:
    augment = True


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(int(cfg.augment))


train_loader = DataLoader(Images(), batch_size=4, num_workers=2)
val_loader = DataLoader(Images(), batch_size=4, num_workers=2)
for epoch in range(3):
    cfg.augment = True
    for batch in train_loader:
        seen = batch.max().item()
    print(seen, end=" ")
    cfg.augment = False
    for batch in val_loader:
        seen = batch.max().item()
    print(seen)
