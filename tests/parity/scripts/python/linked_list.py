from parity import show
from torch.utils.data import DataLoader, Dataset


class Transition:
    def __init__(self, state, before=None):
        self.state, self.before, self.next = state, before, None
        if before is not None:
            before.next = self


class Replay(Dataset):
    def __init__(self):
        last, self.buffer = None, []
        for i in range(3000):
            last = Transition(float(i), last)
            self.buffer.append(last)

    def __len__(self):
        return len(self.buffer)

    def __getitem__(self, i):
        found = self.buffer[i]
        return found.state, found.next.state if found.next else -1.0


for batch in DataLoader(Replay(), batch_size=750, num_workers=2):
    show(batch)
