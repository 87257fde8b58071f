import torch
import torch.multiprocessing as mp
from parity import show
from torch.utils.data import DataLoader, TensorDataset


def add(queue, results):
    total = 0
    while (batch := queue.get()) is not None:
        total += batch[0].sum().item()
        del batch
    results.put(total)


if __name__ == "__main__":
    queue, results = mp.Queue(), mp.Queue()
    process = mp.Process(target=add, args=(queue, results))
    process.start()
    for batch in DataLoader(TensorDataset(torch.arange(10)), batch_size=5, num_workers=1):
        queue.put(batch)
    queue.put(None)
    show(results.get(timeout=20))
    process.join()
