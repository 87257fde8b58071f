import queue
import threading

from parity import show
from torch.utils.data import DataLoader

loader = DataLoader(list(range(12)), batch_size=3, num_workers=2)
batches = queue.Queue(maxsize=2)


def fill():
    for batch in loader:
        batches.put(batch)
    batches.put(None)


threading.Thread(target=fill, daemon=True).start()
while (batch := batches.get()) is not None:
    show(batch)
