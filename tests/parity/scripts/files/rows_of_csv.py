import csv

from parity import show
from torch.utils.data import DataLoader, Dataset

with open("rows.csv", "w", newline="") as file:
    writer = csv.DictWriter(file, ["path", "label"])
    writer.writeheader()
    writer.writerows({"path": f"{i}.png", "label": i % 2} for i in range(5))


class Rows(Dataset):
    def __init__(self, path):
        with open(path, newline="") as file:
            self.rows = list(csv.DictReader(file))

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, i):
        return {**self.rows[i], "label": int(self.rows[i]["label"])}


show(*DataLoader(Rows("rows.csv"), batch_size=3, num_workers=2))
