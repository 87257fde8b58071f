import weakref

from parity import show
from torch.utils.data import DataLoader, Dataset


class Node:
    def __init__(self, value, parent=None):
        self.value = value
        self.parent = weakref.ref(parent) if parent else None


class Tree(Dataset):
    def __init__(self):
        self.root = Node(10)
        self.nodes = [Node(i, self.root) for i in range(4)]

    def __len__(self):
        return 4

    def __getitem__(self, i):
        return self.nodes[i].value + self.nodes[i].parent().value


print("start")
show(*DataLoader(Tree(), batch_size=2, num_workers=1))
