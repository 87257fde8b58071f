# parity: raises=BadImage
from torch.utils.data import DataLoader, Dataset


class BadImage(Exception):
    pass


class Images(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        if i == 4:
            raise BadImage(f"image {i} is black")
        return i


for batch in DataLoader(Images(), batch_size=2, num_workers=2):
    print(batch)
