import multiprocessing as mp

from parity import show
from torch.utils.data import DataLoader


def train(rank, results):
    loader = DataLoader(list(range(rank, 8, 2)), batch_size=2, num_workers=1)
    results.put((rank, [batch.tolist() for epoch in range(2) for batch in loader]))


if __name__ == "__main__":
    results = mp.Queue()
    processes = [mp.Process(target=train, args=(rank, results)) for rank in range(2)]
    for process in processes:
        process.start()
    show(sorted(results.get(timeout=25) for _ in processes))
    for process in processes:
        process.join()
