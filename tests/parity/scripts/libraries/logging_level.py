import logging

from parity import show
from torch.utils.data import DataLoader, Dataset

logging.basicConfig(level=logging.INFO)
logging.getLogger("quiet").setLevel(logging.ERROR)
logger = logging.getLogger(__name__)


class Logged(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        logger.info("sample %d", i)
        quiet = logging.getLogger("quiet")
        return logger.isEnabledFor(logging.INFO), logger.isEnabledFor(10), quiet.isEnabledFor(logging.WARNING)


for batch in DataLoader(Logged(), batch_size=2, num_workers=1):
    show(batch)
