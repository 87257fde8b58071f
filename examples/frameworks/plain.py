"""A plain PyTorch training loop."""

import torch
from task import BATCH, EPOCHS, SAVE_EVERY, WORKERS, Seen, count_step, dataset, folder, loss_of, model, report

from dataloaderjob import DataLoader


def main() -> None:
    path = folder() / "checkpoint.pt"
    torch.manual_seed(0)
    net, seen = model(), Seen()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = DataLoader(dataset(), BATCH, shuffle=True, num_workers=WORKERS)
    first = 0
    if path.exists():
        saved = torch.load(path)
        first = saved["epoch"]
        for part, name in ((net, "net"), (optimizer, "optimizer"), (loader, "loader"), (seen, "seen")):
            part.load_state_dict(saved[name])
        torch.set_rng_state(saved["rng"])
    for epoch in range(first, EPOCHS):
        for batch in loader:
            seen.add(batch)
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
            step = loader.state_dict()["batches"]
            if step % SAVE_EVERY == 0:
                parts = {"net": net, "optimizer": optimizer, "loader": loader, "seen": seen}
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**states, "epoch": epoch, "rng": torch.get_rng_state()}, path)
            count_step()
    report(net, seen)


if __name__ == "__main__":
    main()
