"""Parts of the scripts that the model is compared with: their datasets, and the loop that measures a rate."""

from __future__ import annotations

WORK = """
def work(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
"""
DATASETS = f"""{WORK}
class Decode(Dataset):
    def __len__(self):
        return LENGTH
    def __getitem__(self, i):
        work(0.002)
        return torch.zeros(1000)

class Storage(Decode):
    def __getitem__(self, i):
        time.sleep(0.003)
        return torch.zeros(1000)

class Quick(Decode):
    def __getitem__(self, i):
        return torch.zeros(1000)

class Tail(Decode):
    def __getitem__(self, i):
        work(0.04 if i % 32 == 0 else 0.001)
        return torch.zeros(1000)

class Stream(IterableDataset):
    def __iter__(self):
        for i in range(LENGTH):
            work(0.002)
            yield torch.zeros(1000)

def collate(samples):
    work(0.02)
    return torch.stack(samples)
"""
"""Datasets whose cost is known. `LENGTH` is their number of samples."""
MEASURED_LOOP = """
    count = 0
    for batch in loader:
        time.sleep(step_s)
        count += 1
        if count == skipped:
            began = time.perf_counter()
        if count > skipped and time.perf_counter() - began > seconds:
            break
    print("rate", (count - skipped) / (time.perf_counter() - began))
"""
"""Takes batches of `loader` with a step of `step_s`. Prints the rate over `seconds`, without the first `skipped`."""
