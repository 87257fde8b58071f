import torch
from parity import show
from torch.utils.data import DataLoader, Dataset, default_collate


class Sometimes(Dataset):
    def __len__(self):
        return 7

    def __getitem__(self, i):
        return None if i % 3 == 1 else {"x": torch.tensor([i])}


def collate(samples):
    kept = [s for s in samples if s is not None]
    return default_collate(kept) if kept else None


show(*DataLoader(Sometimes(), batch_size=2, num_workers=2, collate_fn=collate))
show(*DataLoader(Sometimes(), batch_size=1, num_workers=2, collate_fn=collate))
