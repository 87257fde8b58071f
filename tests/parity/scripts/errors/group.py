from torch.utils.data import DataLoader, Dataset


class Many(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        raise ExceptionGroup("two", [ValueError(1), KeyError(2)])


try:
    for batch in DataLoader(Many(), num_workers=1):
        print(batch)
except Exception as error:
    print(type(error).__name__)
