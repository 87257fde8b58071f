from kinds import Kind, describe
from parity import show
from torch.utils.data import DataLoader, Dataset


class Kinds(Dataset):
    def __init__(self):
        self.kinds = [Kind.TRAIN, Kind.TEST, Kind.TRAIN]

    def __len__(self):
        return 3

    def __getitem__(self, i):
        return self.kinds[i] is Kind.TRAIN, describe(self.kinds[i])


for batch in DataLoader(Kinds(), batch_size=3, num_workers=2):
    show(batch)
