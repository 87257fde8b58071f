from torch.utils.data import DataLoader, Dataset


class Flaky(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i in (2, 5):
            raise ValueError(i)
        return i


iterator = iter(DataLoader(Flaky(), batch_size=2, num_workers=2))
while True:
    try:
        print(next(iterator).tolist())
    except StopIteration:
        break
    except ValueError:
        print("skipped")
