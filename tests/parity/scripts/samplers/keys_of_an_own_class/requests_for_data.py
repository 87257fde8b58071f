from dataclasses import dataclass

from torch.utils.data import Dataset


@dataclass(frozen=True)
class Request:
    index: int
    mode: str


class Server(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, request):
        return request.index if request.mode == "up" else -request.index, type(request) is Request
