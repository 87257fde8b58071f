from parity import show
from torch.utils.data import DataLoader, Dataset


class Sized(Dataset):
    scale = 1

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return i * self.scale


dataset = Sized()
loader = DataLoader(dataset, batch_size=2, num_workers=2, persistent_workers=True)
for epoch in range(3):
    show(*loader)
    dataset.scale = 100  # not seen by workers that live on
show(*DataLoader(dataset, batch_size=2, num_workers=2))
