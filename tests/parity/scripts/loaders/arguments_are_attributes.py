import torch
from parity import show
from torch.utils.data import DataLoader

generator = torch.Generator()
loader = DataLoader(
    list(range(10)),
    batch_size=4,
    shuffle=True,
    num_workers=2,
    prefetch_factor=3,
    persistent_workers=True,
    drop_last=True,
    timeout=20,
    generator=generator,
)
names = [
    "batch_size",
    "num_workers",
    "prefetch_factor",
    "persistent_workers",
    "drop_last",
    "timeout",
    "pin_memory",
]
show({name: getattr(loader, name) for name in names})
show(loader.generator is generator, type(loader.sampler).__name__, type(loader.batch_sampler).__name__)
show(loader.worker_init_fn, loader.collate_fn.__name__, loader.pin_memory_device, loader.in_order)
show(
    len(loader),
    DataLoader([1, 2]).num_workers in (0, 1, 2, 8),
    DataLoader([1], num_workers=2).prefetch_factor,
)
