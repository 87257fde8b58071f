import pickle

import torch
from parity import show
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, num_workers=2, drop_last=True)
show(*loader)
again = pickle.loads(pickle.dumps(loader))
show(*again)
show(type(again) is type(loader), len(again), again.num_workers, again.drop_last)
