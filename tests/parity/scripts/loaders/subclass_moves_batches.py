import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset


class DeviceLoader(DataLoader):
    def __init__(self, *args, device="cpu", scale=1.0, **kwargs):
        super().__init__(*args, **kwargs)
        self.device = torch.device(device)
        self.scale = scale

    def __iter__(self):
        for batch in super().__iter__():
            yield [x.to(self.device) * self.scale for x in batch]


loader = DeviceLoader(TensorDataset(torch.arange(6.0)), batch_size=3, num_workers=2, scale=2.0)
for epoch in range(2):
    show(*loader)
show(loader.device.type, isinstance(loader, DataLoader))
