# parity: raises=ZeroDivisionError
from torch.utils.data import DataLoader


def initialise(worker):
    return 1 // 0


print("start")
for batch in DataLoader(list(range(4)), batch_size=2, num_workers=2, worker_init_fn=initialise):
    print(batch)
