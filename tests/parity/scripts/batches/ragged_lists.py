import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Detections(Dataset):
    def __len__(self):
        return 5

    def __getitem__(self, i):
        return torch.zeros(3, 4 + i, 4), {"boxes": torch.ones(i, 4), "labels": torch.arange(i), "id": i}


loader = DataLoader(Detections(), batch_size=2, num_workers=2, collate_fn=lambda batch: tuple(zip(*batch)))
for images, targets in loader:
    show(images, targets)
