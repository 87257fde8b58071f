import gc

from parity import show
from torch.utils.data import DataLoader

loaders = [DataLoader(list(range(n)), batch_size=2, num_workers=2) for n in range(2, 6)]
iterator = iter(loaders[-1])
del iterator
gc.collect()
show([len(loader) for loader in loaders], isinstance(str(loaders[0]), str))
