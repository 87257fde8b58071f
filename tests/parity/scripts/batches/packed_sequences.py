import torch
from parity import show
from torch.nn.utils.rnn import pack_sequence, pad_sequence
from torch.utils.data import DataLoader, Dataset


class Lines(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return torch.arange(i + 1)


def pack(samples):
    return pack_sequence(samples, enforce_sorted=False), pad_sequence(samples, batch_first=True)


for packed, padded in DataLoader(Lines(), batch_size=2, num_workers=2, collate_fn=pack):
    show(packed, padded, type(packed).__name__)
