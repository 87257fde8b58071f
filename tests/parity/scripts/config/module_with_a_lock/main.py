import store
from parity import show
from torch.utils.data import DataLoader, Dataset


class Stored(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return store.read(i)


store.offset = 50
for batch in DataLoader(Stored(), batch_size=3, num_workers=2):
    show(batch)
