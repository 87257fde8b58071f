"""Measures the table of README.md: `python table.py --epochs 5 --write`.

It runs train.py six times, one after the other: a single process, DataParallel and DistributedDataParallel of two
ranks. Each runs with torch's DataLoader (two workers in all) and with ours (two feeders in all, of the private service
that the loader starts by itself). The machine should have no other work.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import torch
from plot import stall
from proof import load

HERE = Path(__file__).resolve().parent
README = HERE / "README.md"
BEGIN, END = "<!-- table.py writes from here -->\n", "<!-- to here -->\n"
WORKERS = 2
"""Number of torch's workers, or of feeders, for all ranks together."""
RANKS = 2
"""Number of ranks of DistributedDataParallel."""
DEADLINE_S = 3600.0
PAUSE_S, SAMPLE_S = 5.0, 5.0
CALM = 0.1
"""Share of the CPUs that other processes may use before each run; above it, no times are shown."""
LAUNCHES = {"single": "single process", "dp": "DataParallel (one replica)", "ddp": "DDP, two ranks"}
LOADERS = {"torch": "torch's `DataLoader`", "service": "`dataloaderjob.DataLoader`"}
PUBLISHED = {"single": (91.09, 90.65), "dp": (90.32, 90.67), "ddp": (89.84, 88.98)}
"""Percentages after 40 epochs, with torch's DataLoader and with the published distributed one."""


def command(launch: str, loader: str, folder: Path, epochs: int) -> list[str]:
    """Returns the command line of one run."""
    workers = WORKERS // RANKS if (launch, loader) == ("ddp", "torch") else WORKERS
    python = [sys.executable]
    if launch == "ddp":
        python += ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", str(RANKS)]
        python += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    script = [str(HERE / "train.py"), "--loader", loader, "--workers", str(workers), "--record", str(folder)]
    return [*python, *script, "--epochs", str(epochs), *(["--data-parallel"] if launch == "dp" else [])]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def busy() -> float:
    """Returns the busy share of the CPUs' time over SAMPLE_S seconds."""

    def read() -> tuple[int, int]:
        ticks = [int(n) for n in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        return sum(ticks), ticks[3] + ticks[4]  # all, idle

    began = read()
    time.sleep(SAMPLE_S)
    ended = read()
    return 1 - (ended[1] - began[1]) / (ended[0] - began[0])


def run(launch: str, loader: str, folder: Path, epochs: int) -> None:
    """Trains once. Afterwards `folder` has the records of its ranks, and the load of other processes before it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    time.sleep(PAUSE_S)  # the service of the run before may still be ending
    others, began = busy(), time.monotonic()
    print(f"-- {launch}, {loader}; CPUs {100 * others:.0f}% in use by others", flush=True)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}  # as torchrun sets it for its ranks; same in all runs
    subprocess.run(command(launch, loader, folder, epochs), check=True, env=env, timeout=DEADLINE_S)
    figures = {"busy_before": others, "wall_s": time.monotonic() - began}
    (folder / "run.json").write_text(json.dumps(figures))


def cell(folder: Path, *, times: bool) -> str:
    """Returns the accuracy of one run, and with `times` the median time of an epoch and the median stall."""
    records = load(folder)
    epochs = records[0]["epochs"]
    accuracy = f"{100 * epochs[-1]['accuracy']:.2f}%"
    if not times:
        return accuracy
    seconds = statistics.median(epoch["seconds"] for epoch in epochs)
    waiting = statistics.median(stall(r, i) for r in records for i in range(len(epochs)))
    return f"{accuracy}, {seconds:.1f} s, {waiting:.1f}%"


def table(folders: dict[tuple[str, str], Path]) -> str:
    """Returns the table as Markdown, with the conditions of the measurement."""
    runs: list[dict[str, Any]] = [json.loads((f / "run.json").read_text()) for f in folders.values()]
    calm = all(run.get("busy_before", 1.0) <= CALM for run in runs)
    lines = [
        f"| | {' | '.join(LOADERS.values())} | published, torch's | published, distributed |",
        "|---|---|---|---|---|",
    ]
    for launch, title in LAUNCHES.items():
        cells = [cell(folders[launch, loader], times=calm) for loader in LOADERS]
        cells += [f"{value:.2f}%" for value in PUBLISHED[launch]]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    options = load(next(iter(folders.values())))[0]["options"]
    what = "Accuracy on the 10,000 test images after the last epoch"
    if calm:
        what += (
            ", then medians over the epochs: seconds for training and test, and the share of the training "
            "pass that a rank waited for batches"
        )
    note = (
        f"{what}. {options['epochs']} epochs, one run each, seed {options['seed']}; one math thread for each "
        f"trainer; {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}."
    )
    if not calm:
        note += " Other work ran on the machine meanwhile, so times are left out."
    return "\n".join([*lines, "", textwrap.fill(note, 105)]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--out", type=Path, default=HERE / "out" / "table", help="folder of the records")
    parser.add_argument(
        "--only", default="", metavar="CASES", help="run only these, such as dp-torch,ddp-service"
    )
    parser.add_argument("--keep", action="store_true", help="run nothing; use existing records")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    args = parser.parse_args()
    folders = {(la, lo): args.out / f"{la}-{lo}" for la in LAUNCHES for lo in LOADERS}
    only = set(filter(None, args.only.split(",")))
    unknown = only - {folder.name for folder in folders.values()}
    if unknown:
        parser.error(f"no case {', '.join(unknown)}: use {', '.join(f.name for f in folders.values())}")
    for (launch, loader), folder in folders.items():
        if not args.keep and (not only or folder.name in only):
            run(launch, loader, folder, args.epochs)
    text = table(folders)
    print(text)
    if args.write:
        before, rest = README.read_text().split(BEGIN)
        README.write_text(before + BEGIN + text + END + rest.split(END)[1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
