# parity: alone
from parity import show
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Workers(Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return get_worker_info().num_workers


for n in (1, 2, 3):
    loader = DataLoader(Workers(), batch_size=2, num_workers=n)
    show({number for batch in loader for number in batch.tolist()})
