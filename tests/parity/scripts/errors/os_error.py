from torch.utils.data import DataLoader, Dataset


class Missing(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        with open(f"no-such-{i}") as file:
            return file.read()


try:
    for batch in DataLoader(Missing(), batch_size=2, num_workers=2):
        print(batch)
except FileNotFoundError as error:
    print(type(error).__name__, isinstance(error, OSError), "no-such-0" in str(error))
