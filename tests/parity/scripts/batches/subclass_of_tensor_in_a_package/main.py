from parity import show
from torch.utils.data import DataLoader
from vision.datasets import Pictures
from vision.tensors import Image

for images in DataLoader(Pictures(), batch_size=2, num_workers=2, collate_fn=list):
    show(images, [isinstance(image, Image) for image in images], images[0].height)
