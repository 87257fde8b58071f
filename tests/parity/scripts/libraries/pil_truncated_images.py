import io

import numpy as np
from parity import show
from PIL import Image, ImageFile
from torch.utils.data import DataLoader, Dataset

ImageFile.LOAD_TRUNCATED_IMAGES = True
buffer = io.BytesIO()
Image.fromarray(np.arange(64 * 64 * 3, dtype=np.uint8).reshape(64, 64, 3)).save(buffer, "JPEG")
with open("broken.jpg", "wb") as file:
    file.write(buffer.getvalue()[:-200])


class Images(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        with Image.open("broken.jpg") as image:
            return np.asarray(image.convert("RGB"))[:, :, i % 3]


for batch in DataLoader(Images(), batch_size=2, num_workers=2):
    show(batch)
