import numpy as np
from parity import show
from PIL import Image
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return Image.fromarray(np.full((4, 4, 3), i, np.uint8)), i


def collate(samples):
    return [image for image, _ in samples], [i for _, i in samples]


for images, labels in DataLoader(Images(), batch_size=2, num_workers=2, collate_fn=collate):
    show(
        [(im.mode, im.size, im.getpixel((0, 0))) for im in images], labels, isinstance(images[0], Image.Image)
    )
