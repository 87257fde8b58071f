"""Accelerate, with `save_state` and `load_state`."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from task import BATCH, EPOCHS, SAVE_EVERY, WORKERS, Seen, count_step, dataset, folder, loss_of, model, report

from dataloaderjob import DataLoader
from dataloaderjob.accelerate import adopt


class Steps:
    """The number of steps in this epoch, which Accelerate does not save."""

    taken = 0

    def state_dict(self):
        return {"taken": self.taken}

    def load_state_dict(self, state):
        self.taken = state["taken"]


def main() -> None:
    path = folder() / "state"
    set_seed(0)
    accelerator = Accelerator(cpu=True)
    net, seen, steps = model(), Seen(), Steps()
    net, optimizer, loader = accelerator.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        DataLoader(dataset(), BATCH, shuffle=True, num_workers=WORKERS),
    )
    loader = adopt(loader)
    accelerator.register_for_checkpointing(seen, steps)
    if path.exists():
        accelerator.load_state(path)
    while loader.iteration < EPOCHS:
        for batch in loader:
            steps.taken += 1
            seen.add(batch)
            optimizer.zero_grad()
            accelerator.backward(loss_of(net, batch))
            optimizer.step()
            if steps.taken % SAVE_EVERY == 0:
                accelerator.save_state(path)
            count_step()
        steps.taken = 0
    report(net, seen)


if __name__ == "__main__":
    main()
