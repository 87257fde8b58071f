import io

import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Noise(Dataset):
    def __len__(self):
        return 30

    def __getitem__(self, i):
        return torch.full((100,), float(i)), {"index": i}


kept = list(DataLoader(Noise(), batch_size=2, num_workers=2))
buffer = io.BytesIO()
torch.save(kept[3], buffer)
buffer.seek(0)
show(torch.load(buffer), len(buffer.getvalue()) < 6000)
show(torch.cat([x for x, _ in kept]))
