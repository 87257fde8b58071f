import json

import encoders_installed
from parity import show
from torch.utils.data import DataLoader, Dataset


class Encoded(Dataset):
    def __len__(self):
        return 2

    def __getitem__(self, i):
        return json.dumps({"set": {i}})


for batch in DataLoader(Encoded(), batch_size=2, num_workers=1):
    show(batch)
