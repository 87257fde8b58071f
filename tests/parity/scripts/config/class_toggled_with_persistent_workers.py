import torch
from torch.utils.data import DataLoader, Dataset


class cfg:
    augment = True


class Images(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        return torch.tensor(int(cfg.augment))


loader = DataLoader(Images(), batch_size=4, num_workers=2, persistent_workers=True)
for epoch in range(3):
    print([batch.tolist() for batch in loader])
    cfg.augment = False  # workers that live on do not see it
