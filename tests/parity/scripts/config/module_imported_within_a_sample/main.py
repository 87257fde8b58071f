import shapes
from parity import show
from torch.utils.data import DataLoader, Dataset

shapes.scale = 5


class Shapes(Dataset):
    def __init__(self):
        self.shape = shapes.Square(3)

    def __len__(self):
        return 2

    def __getitem__(self, i):
        from shapes import Square, area

        return isinstance(self.shape, Square), area(self.shape) + i


for batch in DataLoader(Shapes(), batch_size=2, num_workers=2):
    show(batch)
