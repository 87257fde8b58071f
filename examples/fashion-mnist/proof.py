"""Proves that the ranks of a run consumed the right batches: `python proof.py out`.

While a run with `--record out` trains, `Record` hashes every batch that a rank takes. Afterwards each rank's epochs are
made again in this process, by the loader with num_workers=0. Epochs without augmentation are also made by torch's own
DataLoader over the same sampler. All digests have to be equal.

`dataloaderjob verify` needs no line in a script, but it trusts the loader: feeders make its digests, and the record has
the keys. This proof does not trust the loader. It hashes the tensors that the training loop received, draws the keys
again from the script's seeds, and compares with torch's loader.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dataloaderjob.batches.digest import digest_update

Pass = dict[str, Any]
"""One pass over one loader: split, epoch, augment, batches, digest, wait_s, first_wait_s, seconds."""


class ProofError(Exception):
    """A record is missing or a digest differs. The message names it."""


class Record:
    """The batches that one rank consumed, and its waits: a JSON file, complete after each epoch."""

    def __init__(self, folder: str, *, rank: int, world: int, options: dict[str, Any]) -> None:
        self._path = Path(folder) / f"rank-{rank}.json"
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.unlink(missing_ok=True)
        self._passes: list[Pass] = []
        self._epochs: list[dict[str, float]] = []
        self._about = {"rank": rank, "world": world, "options": options}

    def watch(self, loader: Any, epoch: int) -> Iterator[Any]:
        """Yields the loader's batches, and hashes each."""
        hasher, waits = hashlib.sha256(), []
        began = now = time.perf_counter()
        batches = iter(loader)
        for batch in batches:
            waits.append(time.perf_counter() - now)
            digest_update(hasher, batch)
            yield batch
            now = time.perf_counter()
        self._passes.append(
            {
                "split": "train" if loader.sampler.shuffle else "test",
                "epoch": epoch,
                "augment": loader.dataset.augment,
                "batches": len(waits),
                "digest": hasher.hexdigest(),
                "first_wait_s": round(waits[0], 6) if waits else 0.0,
                "wait_s": round(sum(waits), 6),
                "seconds": round(time.perf_counter() - began, 6),
            }
        )

    def digests(self) -> list[str]:
        """Returns the digests of all passes so far."""
        return [str(one["digest"]) for one in self._passes]

    def epoch(self, **figures: float) -> None:
        """Ends an epoch. All figures so far are on disk when this returns."""
        self._epochs.append(figures)
        text = json.dumps({**self._about, "epochs": self._epochs, "passes": self._passes}, indent=1)
        part = self._path.with_suffix(".part")
        part.write_text(text)
        os.replace(part, self._path)


def load(folder: Path) -> list[dict[str, Any]]:
    """Returns the records of all ranks, in order of rank. Raises ProofError if one is missing or incomplete."""
    records = [json.loads(path.read_text()) for path in folder.glob("rank-*.json")]
    records.sort(key=lambda record: record["rank"])
    if not records:
        raise ProofError(f"{folder} has no rank-*.json: run train.py with --record {folder} first")
    world = records[0]["world"]
    if [r["rank"] for r in records] != list(range(world)) or any(r["world"] != world for r in records):
        found = ", ".join(f"{r['rank']} of {r['world']}" for r in records)
        raise ProofError(f"{folder} needs one record for each of {world} ranks, found {found}: run again")
    for record in records:
        done, wanted = len(record["epochs"]), record["options"]["epochs"]
        if done != wanted:
            raise ProofError(f"rank {record['rank']} ended after {done} of {wanted} epochs: run again")
    return records


def reference(record: dict[str, Any], kind: str, passes: Iterable[Pass]) -> Iterator[str]:
    """Makes the same passes of one rank here, one after another, and yields their digests. `kind` is inprocess, or
    torch for torch's loader with num_workers=0."""
    import train
    from fashion import FashionMNIST

    args = argparse.Namespace(**{**record["options"], "loader": kind, "workers": 0})
    rank, world = record["rank"], record["world"]
    sets = {split: FashionMNIST(split, limit=args.limit) for split in ("train", "test")}
    loaders = {
        split: train.make_loader(args, dataset, rank=rank, world=world, shuffle=split == "train")
        for split, dataset in sets.items()
    }
    for one in passes:
        loader = loaders[one["split"]]
        loader.sampler.set_epoch(one["epoch"])
        loader.dataset.augment = one["augment"]
        hasher = hashlib.sha256()
        for batch in loader:
            digest_update(hasher, batch)
        yield hasher.hexdigest()


def prove(record: dict[str, Any]) -> None:
    """Makes each pass of one rank and prints a line for it. Raises ProofError at the first difference."""
    passes = record["passes"]
    torchs = reference(record, "torch", [one for one in passes if not one["augment"]])
    for one, own in zip(passes, reference(record, "inprocess", passes), strict=True):
        what = f"rank {record['rank']}, epoch {one['epoch'] + 1}, {one['split']}"
        expected = {"num_workers=0": own}
        if not one["augment"]:
            expected["torch's DataLoader"] = next(torchs)
        for name, digest in expected.items():
            if digest != one["digest"]:
                raise ProofError(
                    f"{what}: the rank consumed {one['digest'][:16]}, but {name} makes {digest[:16]}"
                )
        kind = "augmented" if one["augment"] else "plain"
        equal = " and ".join(expected)
        print(f"{what}: {one['batches']} {kind} batches, {one['digest'][:16]}, equal to {equal}", flush=True)


def digest(ranks: Iterable[Iterable[str]]) -> str:
    """Returns the digest of all batches of all ranks, from the digests of each rank's passes."""
    return hashlib.sha256("".join(one for passes in ranks for one in passes).encode()).hexdigest()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path, help="the --record folder of train.py")
    folder = parser.parse_args().folder
    try:
        records = load(folder)
        if records[0]["options"]["loader"] == "torch" and any(p["augment"] for p in records[0]["passes"]):
            raise ProofError("torch's workers draw other augmentation in each run: use --loader service")
        for record in records:
            prove(record)
    except ProofError as exc:
        print(f"run failed: {exc}", file=sys.stderr)
        return 1
    accuracy = records[0]["epochs"][-1]["accuracy"]
    found = digest([one["digest"] for one in record["passes"]] for record in records)
    print(f"run ok: accuracy {accuracy:.3f}, digest {found[:16]}, equal to the reference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
