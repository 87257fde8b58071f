from torch.utils.data import Dataset


def download(url):
    return "not found: " + url


class Downloads(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return download(f"http://{i}")
