import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Node:
    def __init__(self, key):
        self.key, self.edges = key, {}

    def __hash__(self):
        return hash(self.key)

    def __eq__(self, other):
        return self.key == other.key


nodes = [Node(i) for i in range(8)]
for one in nodes:
    for other in nodes:
        if one is not other and (one.key + other.key) % 3 == 0:
            one.edges[other] = float(one.key * other.key)


class Graph(Dataset):
    def __len__(self):
        return len(nodes)

    def __getitem__(self, i):
        return torch.tensor(sum(nodes[i].edges.values()))


for batch in DataLoader(Graph(), batch_size=4, num_workers=2):
    show(batch)
