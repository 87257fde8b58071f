from parity import show
from requests_for_data import Request, Server
from torch.utils.data import DataLoader

requests = [Request(i, mode) for i, mode in enumerate(["up", "down", "up"])]
show(*DataLoader(Server(), batch_size=2, sampler=requests, num_workers=2))
