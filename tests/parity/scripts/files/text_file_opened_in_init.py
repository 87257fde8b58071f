from parity import show
from torch.utils.data import DataLoader, Dataset

with open("lines.txt", "w", encoding="utf8") as out:
    out.writelines(f"é{i}\n" for i in range(8))


class Lines(Dataset):
    def __init__(self):
        self.file = open("lines.txt", encoding="utf8")
        self.offsets = []
        while True:
            offset = self.file.tell()
            if not self.file.readline():
                break
            self.offsets.append(offset)

    def __len__(self):
        return len(self.offsets)

    def __getitem__(self, i):
        self.file.seek(self.offsets[i])
        return self.file.readline().strip()


print("start")
show(*DataLoader(Lines(), batch_size=4))
show(*DataLoader(Lines(), batch_size=4, num_workers=1))
