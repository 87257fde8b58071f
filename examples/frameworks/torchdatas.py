"""torchdata's StatefulDataLoader on our feeders."""

import torch
from task import BATCH, EPOCHS, SAVE_EVERY, Seen, count_step, dataset, folder, loss_of, model, report
from torchdata.stateful_dataloader import StatefulDataLoader

import dataloaderjob


def main() -> None:
    path = folder() / "checkpoint.pt"
    torch.manual_seed(0)
    net, seen = model(), Seen()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    loader = StatefulDataLoader(
        dataset(), BATCH, shuffle=True, num_workers=2, multiprocessing_context=dataloaderjob.context()
    )
    first, step, rng = 0, 0, None
    if path.exists():
        saved = torch.load(path)
        first, step = saved["epoch"], saved["step"]
        for part, name in ((net, "net"), (optimizer, "optimizer"), (loader, "loader"), (seen, "seen")):
            part.load_state_dict(saved[name])
        rng = saved["rng"]
    for epoch in range(first, EPOCHS):
        batches = iter(loader)
        if rng is not None:
            torch.set_rng_state(rng)  # only now: torchdata's iter() draws a seed
            rng = None
        for batch in batches:
            step += 1
            seen.add(batch)
            optimizer.zero_grad()
            loss_of(net, batch).backward()
            optimizer.step()
            if step % SAVE_EVERY == 0:
                parts = {"net": net, "optimizer": optimizer, "loader": loader, "seen": seen}
                states = {name: part.state_dict() for name, part in parts.items()}
                torch.save({**states, "epoch": epoch, "step": step, "rng": torch.get_rng_state()}, path)
            count_step()
        step = 0
    report(net, seen)


if __name__ == "__main__":
    main()
