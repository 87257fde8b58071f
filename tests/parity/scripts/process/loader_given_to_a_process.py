import multiprocessing as mp

from parity import show
from torch.utils.data import DataLoader


def consume(loader, results):
    for batch in loader:
        results.put(batch.tolist())
    results.put(None)


if __name__ == "__main__":
    results = mp.Queue()
    loader = DataLoader(list(range(5)), batch_size=2, num_workers=1)
    process = mp.Process(target=consume, args=(loader, results))
    process.start()
    show(list(iter(lambda: results.get(timeout=25), None)))
    process.join()
    show(process.exitcode, *loader)
