from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(list(range(8)), batch_size=3, num_workers=2, prefetch_factor=4)
names = [
    "batch_sampler",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "pin_memory_device",
    "in_order",
]
again = type(loader)(loader.dataset, **{name: getattr(loader, name) for name in names})
show(*again)
show([name for name in dir(loader) if name.startswith("pin") or name.startswith("persistent")])
