from parity import show
from torch.utils.data import DataLoader, Dataset

words = ["alpha", "beta", "gamma", "delta"]


class Hashed(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return hash(words[i]) % 1000


(batch,) = DataLoader(Hashed(), batch_size=4, num_workers=2)
show(batch.tolist() == [hash(word) % 1000 for word in words])
