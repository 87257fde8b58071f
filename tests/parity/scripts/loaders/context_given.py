import multiprocessing

from parity import show
from torch.utils.data import DataLoader

for context in ("fork", multiprocessing.get_context("fork"), None):
    show(*DataLoader(list(range(4)), batch_size=2, num_workers=2, multiprocessing_context=context))
