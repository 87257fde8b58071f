import atexit
import sys

from torch.utils.data import DataLoader

atexit.register(print, "bye")
for step, batch in enumerate(DataLoader(list(range(10)), batch_size=2, num_workers=2)):
    print(batch.tolist())
    if step == 1:
        sys.exit(3)
