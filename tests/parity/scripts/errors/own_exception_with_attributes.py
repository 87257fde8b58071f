from torch.utils.data import DataLoader, Dataset


class BadRow(ValueError):
    def __init__(self, row, column):
        super().__init__(f"row {row}, column {column}")
        self.row, self.column = row, column


class Rows(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        if i == 2:
            raise BadRow(i, "price")
        return i


try:
    for batch in DataLoader(Rows(), batch_size=2, num_workers=1):
        print(batch)
except Exception as error:
    print(type(error).__name__, getattr(error, "row", None))
