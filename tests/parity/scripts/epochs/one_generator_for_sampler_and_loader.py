import torch
from parity import show
from torch.utils.data import DataLoader, RandomSampler

data = list(range(12))
generator = torch.Generator()
generator.manual_seed(7)
sampler = RandomSampler(data, replacement=True, num_samples=9, generator=generator)
loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=1, generator=generator)
for epoch in range(3):
    for step, batch in enumerate(loader):
        show(batch)
        if epoch == 1 and step == 1:
            break
show(torch.randint(100, (3,), generator=generator))
