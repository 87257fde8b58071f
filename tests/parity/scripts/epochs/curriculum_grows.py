from parity import show
from torch.utils.data import DataLoader, Dataset


class Curriculum(Dataset):
    def __init__(self):
        self.levels = ["easy"]

    def __len__(self):
        return 3 * len(self.levels)

    def __getitem__(self, i):
        return f"{self.levels[i // 3]}-{i % 3}"


dataset = Curriculum()
loader = DataLoader(dataset, batch_size=2, num_workers=2, shuffle=False)
for level in ("medium", "hard", "expert"):
    show(len(loader), *loader)
    dataset.levels.append(level)
