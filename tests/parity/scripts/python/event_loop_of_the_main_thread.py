import asyncio
import threading
import warnings

from parity import show
from torch.utils.data import DataLoader, Dataset

warnings.simplefilter("ignore")


class Fetched(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        loop = asyncio.get_event_loop()
        future = loop.run_in_executor(None, pow, i, 2)
        return loop.run_until_complete(future), threading.current_thread() is threading.main_thread()


show(*DataLoader(Fetched(), batch_size=2, num_workers=1))
