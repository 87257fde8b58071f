import torch
from parity import show
from torch.utils.data import DataLoader, Dataset

names = "bool uint8 int8 int16 int32 int64 uint16 uint32 uint64 float16 bfloat16 float32 float64 complex64 complex128"
extra = "float8_e4m3fn float8_e5m2 float8_e4m3fnuz complex32"


class Dtypes(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        plain = {name: torch.tensor([0, 1, i]).to(getattr(torch, name)) for name in names.split()}
        return plain | {name: torch.tensor([0.0, 1.0, i]).to(getattr(torch, name)) for name in extra.split()}


def collate(samples):
    whole = torch.utils.data.default_collate([{k: s[k] for k in names.split()} for s in samples])
    return whole, [{k: s[k] for k in extra.split()} for s in samples]


for batch in DataLoader(Dtypes(), batch_size=2, num_workers=2, collate_fn=collate):
    show(batch)
