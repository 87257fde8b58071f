import backends
from parity import show
from torch.utils.data import DataLoader


class Fast(backends.Decoder):
    def decode(self, i):
        return super().decode(i) + 100


backends.Decoder = Fast
for batch in DataLoader(backends.Videos(), batch_size=2, num_workers=2):
    show(batch)
