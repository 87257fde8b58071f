import torch

from dataloaderjob import DataLoader


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, i):
        return torch.full((64, 64), i), i * i


taken = 0
for numbers, squares in DataLoader(Squares(), batch_size=32):
    wanted = torch.arange(taken, taken + 32)
    if not torch.equal(squares, wanted**2) or not torch.equal(
        numbers, wanted[:, None, None].expand(-1, 64, 64)
    ):
        raise SystemExit(f"the batch after {taken} samples is not what the dataset says")
    taken += len(squares)
print(f"{taken} samples came from feeders, in order and byte for byte")
