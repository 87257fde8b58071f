import numpy as np
from PIL import Image
from torch.utils.data import DataLoader, Dataset

# parity: raises=DecompressionBombError
Image.MAX_IMAGE_PIXELS = 100
Image.fromarray(np.zeros((32, 32), np.uint8)).save("large.png")


class Images(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return np.asarray(Image.open("large.png"))


print("limit set")
for batch in DataLoader(Images(), num_workers=1):
    print(batch.shape)
