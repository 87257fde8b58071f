"""Peers of B20: torch's own DataLoader over the same dataset, and Petastorm, by batches and by rows.

Petastorm's last release needs an older pyarrow and numpy than the rest, so `make bench-petastorm` makes an environment
of its own for it. This module also runs there.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from bench import machine, tables
from bench.cell import main
from bench.tables import FEATURES, Case

PYTHON = machine.ROOT / ".venv-petastorm" / "bin" / "python"
BATCHES, ROWS = "Petastorm, batches", "Petastorm, rows"


def torch_loader(case: Case) -> dict[str, Any]:
    """Measures torch's loader. Trainer and workers are the node's processes."""
    dataset = tables.Tables(case)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=case.producers)
    return tables.measure(iter(loader), case, node_pids=tables.own_tree)


def petastorm(case: Case, party: str) -> dict[str, Any]:
    if Path(sys.executable) == PYTHON:
        return tables.measure(_stream(case, party), case, node_pids=tables.own_tree)
    if not PYTHON.exists():
        raise NotImplementedError(f"{PYTHON}: make bench-petastorm")
    tables.files(case)
    spec, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    done = subprocess.run([PYTHON, "-m", "bench.peers.tables", json.dumps(spec), str(out)], check=False)
    if done.returncode:
        raise RuntimeError(f"{party} ended with {done.returncode}; its output is above")
    return dict(json.loads(out.read_text()))


def _stream(case: Case, party: str) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    from petastorm import make_batch_reader
    from petastorm.pytorch import BatchedDataLoader, DataLoader

    urls = [path.as_uri() for path in tables.files(case)]
    make = BatchedDataLoader if party == BATCHES else DataLoader
    with make_batch_reader(
        urls, reader_pool_type=os.environ.get("BENCH_POOL", "thread"), workers_count=case.producers,
        shuffle_row_groups=False, num_epochs=1,
    ) as reader:  # fmt: skip
        for batch in make(reader, batch_size=case.batch):
            yield torch.stack([batch[name] for name in FEATURES], 1), batch["id"]


PEERS = {
    "DataLoader": torch_loader,
    BATCHES: functools.partial(petastorm, party=BATCHES),
    ROWS: functools.partial(petastorm, party=ROWS),
}

if __name__ == "__main__":
    sys.exit(main())
