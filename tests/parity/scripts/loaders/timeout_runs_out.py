# parity: raises=RuntimeError
import time

from torch.utils.data import DataLoader, Dataset


class Slow(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        time.sleep(6 if i == 2 else 0)
        return i


try:
    for batch in DataLoader(Slow(), batch_size=2, num_workers=1, timeout=1):
        print(batch.tolist())
except RuntimeError as error:
    raise RuntimeError("too slow") from error
