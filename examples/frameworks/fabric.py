"""Lightning Fabric."""

import torch
from lightning.fabric import Fabric
from task import BATCH, EPOCHS, SAVE_EVERY, WORKERS, Seen, count_step, dataset, folder, loss_of, model, report

from dataloaderjob import DataLoader


def main() -> None:
    path = folder() / "checkpoint.ckpt"
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.seed_everything(0)
    seen = Seen()
    net = model()
    net, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
    loader = DataLoader(dataset(), BATCH, shuffle=True, num_workers=WORKERS)
    batches = fabric.setup_dataloaders(loader)
    state = {"net": net, "optimizer": optimizer, "loader": loader, "seen": seen, "epoch": 0, "rng": None}
    if path.exists():
        fabric.load(path, state)
        torch.set_rng_state(state["rng"])
    for epoch in range(state["epoch"], EPOCHS):
        for batch in batches:
            seen.add(batch)
            optimizer.zero_grad()
            fabric.backward(loss_of(net, batch))
            optimizer.step()
            step = loader.state_dict()["batches"]
            if step % SAVE_EVERY == 0:
                state["epoch"], state["rng"] = epoch, torch.get_rng_state()
                fabric.save(path, state)
            count_step()
    report(net, seen)


if __name__ == "__main__":
    main()
