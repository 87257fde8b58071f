from parity import show
from torch.utils.data import DataLoader, Dataset


class Weights(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, i):
        with open("weights.txt") as file:
            return float(file.read().split()[i])


loader = DataLoader(Weights(), batch_size=3, num_workers=2)
for epoch in range(3):
    with open("weights.txt", "w") as file:
        file.write(" ".join(str(epoch + i / 4) for i in range(3)))
    show(*loader)
