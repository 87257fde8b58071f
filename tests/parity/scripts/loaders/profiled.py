import torch
from torch.utils.data import DataLoader, TensorDataset

loader = DataLoader(TensorDataset(torch.arange(6)), batch_size=2, num_workers=2)
with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
    for batch in loader:
        pass
names = {event.key for event in profile.key_averages()}
print([name for name in names if "enumerate(DataLoader)" in name and name.endswith("__next__")] != [])
