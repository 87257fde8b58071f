from parity import show
from torch.utils.data import DataLoader, Dataset

vocabulary = {f"word{i}" for i in range(50)}


class Words(Dataset):
    def __init__(self):
        self.words = {f"w{i}" for i in range(50)}

    def __len__(self):
        return 50

    def __getitem__(self, i):
        return list(vocabulary)[i], list(self.words)[i]


data = Words()
(batch,) = DataLoader(data, batch_size=50, num_workers=2)
show(list(batch[0]) == list(vocabulary), list(batch[1]) == list(data.words))
