from parity import show
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

data = list(range(11))
for rank in range(2):
    sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=3)
    loader = DataLoader(data, batch_size=3, sampler=sampler, num_workers=1)
    for epoch in range(2):
        loader.sampler.set_epoch(epoch)
        show(rank, *loader)
