from errors import BadImage, DataError
from images import Images
from torch.utils.data import DataLoader

try:
    for batch in DataLoader(Images(), batch_size=2, num_workers=2):
        print(batch)
except DataError as error:
    print("caught", type(error) is BadImage)
