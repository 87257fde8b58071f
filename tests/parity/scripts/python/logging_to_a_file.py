import logging

from parity import show
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(filename="run.log", level=logging.INFO, format="%(levelname)s %(message)s")
log = logging.getLogger("data")


class Logged(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        log.info("sample %d", i)
        log.debug("not shown")
        return i


show(*DataLoader(Logged(), batch_size=2, num_workers=2))
logging.shutdown()
show(sorted(open("run.log").read().splitlines()))
