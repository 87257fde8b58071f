import warnings

from parity import show
from torch.utils.data import DataLoader

warnings.simplefilter("ignore")


class Liar:
    def __init__(self, says, gives):
        self.says, self.gives = says, gives

    def __len__(self):
        return self.says

    def __iter__(self):
        return iter(range(self.gives))


for says, gives in ((2, 5), (9, 4)):
    loader = DataLoader(list(range(10)), batch_size=2, sampler=Liar(says, gives), num_workers=2)
    show(len(loader), *loader)
