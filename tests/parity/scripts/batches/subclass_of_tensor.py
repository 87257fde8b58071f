import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class BoundingBoxes(torch.Tensor):
    """As tv_tensors are made."""

    @classmethod
    def make(cls, data, canvas):
        boxes = torch.as_tensor(data).as_subclass(cls)
        boxes.canvas = canvas
        return boxes


class Boxes(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return BoundingBoxes.make([[i, 0, i + 1.0, 1]], (10, 20 + i)), i


def collate(samples):
    return [boxes for boxes, _ in samples], torch.tensor([i for _, i in samples])


for boxes, labels in DataLoader(Boxes(), batch_size=2, num_workers=2, collate_fn=collate):
    show(boxes, labels, type(boxes[0]) is BoundingBoxes, boxes[0].canvas)
