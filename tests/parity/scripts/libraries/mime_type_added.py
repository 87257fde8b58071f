import mimetypes

from parity import show
from torch.utils.data import DataLoader, Dataset

mimetypes.add_type("image/raw", ".rawx")


class Types(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return str(mimetypes.guess_type("a.rawx")[0])


for batch in DataLoader(Types(), batch_size=2, num_workers=1):
    show(batch)
