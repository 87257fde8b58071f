import warnings

from torch.utils.data import DataLoader, Dataset

# parity: raises=UserWarning
warnings.simplefilter("error", UserWarning)


class Careless(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 3:
            warnings.warn("a broken file")
        return i


for batch in DataLoader(Careless(), batch_size=2, num_workers=2):
    print(batch)
