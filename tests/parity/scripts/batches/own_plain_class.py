import torch
from parity import show
from torch.utils.data import DataLoader, Dataset


class Graph:
    def __init__(self, x, edges):
        self.x, self.edges = x, edges

    @property
    def nodes(self):
        return len(self.x)


class Graphs(Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return Graph(torch.zeros(i + 1, 2), torch.tensor([[0], [i]]))


def join(graphs):
    return Graph(torch.cat([g.x for g in graphs]), torch.cat([g.edges for g in graphs], 1))


for batch in DataLoader(Graphs(), batch_size=2, num_workers=2, collate_fn=join):
    show(type(batch) is Graph, batch.nodes, batch)
