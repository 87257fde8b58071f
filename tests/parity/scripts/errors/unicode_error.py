from torch.utils.data import DataLoader, Dataset


class Texts(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return b"\xff".decode("utf-8")


try:
    for batch in DataLoader(Texts(), num_workers=1):
        print(batch)
except Exception as error:
    print(type(error).__name__)
