import torch
from torch.utils.data import DataLoader

data = list(range(4))
bad = [
    {"num_workers": -1},
    {"timeout": -1},
    {"batch_size": 0},
    {"batch_size": 2.5},
    {"batch_size": None, "drop_last": True},
    {"shuffle": True, "sampler": [0]},
    {"batch_sampler": [[0]], "batch_size": 2},
    {"batch_sampler": [[0]], "shuffle": True},
    {"num_workers": 0, "prefetch_factor": 2},
    {"num_workers": 2, "prefetch_factor": -1},
    {"num_workers": 0, "persistent_workers": True},
    {"num_workers": 0, "multiprocessing_context": "fork"},
    {"num_workers": 1, "multiprocessing_context": "no such"},
    {"no_such": 1},
]
for arguments in bad:
    try:
        DataLoader(data, **arguments)
    except Exception as error:
        kind = next(k for k in (ValueError, TypeError, RuntimeError, Exception) if isinstance(error, k))
        print(arguments, kind.__name__)
    else:
        print(arguments, "taken")
