import os
import tempfile

import torch
import torch.distributed as dist
from parity import show
from torch.utils.data import DataLoader, DistributedSampler

with tempfile.TemporaryDirectory() as folder:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    data = list(range(10))
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in loader:
            dist.all_reduce(batch)
            show(batch)
    dist.destroy_process_group()
