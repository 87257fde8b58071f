from torch.utils.data import DataLoader, Dataset


class Sometimes(Dataset):
    broken = True

    def __len__(self):
        return 8

    def __getitem__(self, i):
        if i == 5 and self.broken:
            raise ValueError(f"sample {i}")
        return i


dataset = Sometimes()
loader = DataLoader(dataset, batch_size=2, num_workers=2)
for epoch in range(3):
    try:
        for batch in loader:
            print(batch.tolist())
    except ValueError as error:
        print(epoch, type(error).__name__, "sample 5" in str(error))
        dataset.broken = False
