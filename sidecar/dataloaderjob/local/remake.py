"""Makes batches of a record again, in a child process for each bundle, and tells their digests.

A process becomes what a bundle's trainer was, so it can load one only. `main` is the child: it reads what to make as
JSON, a line for each batch, and answers by a line; what user code prints goes to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.processes import die_with_parent
from dataloaderjob.core.records import Record, Recorded


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A batch that was made again."""

    batch: Recorded
    digest: int
    error: str = ""
    """What making it raised."""
    body: Path | None = None
    """Its bytes, where they were asked for and can travel."""


def remake(record: Record, batches: Iterable[Recorded], bodies: Path | None = None) -> Iterator[Result]:
    """Makes batches of one bundle again, one after the other. `bodies`: a folder for their bytes.

    Raises InputError where the bundle cannot be loaded.
    """
    wanted = list(batches)
    found = wanted[0].piece.bundle(wanted[0].row)
    if found is None:
        raise InputError("what made these batches was not kept: the trainer could not pickle it")
    bundle, in_process = found
    order = {
        "blobs": str(record.store.folder.absolute()),
        "bundle": bundle.manifest().decode(),
        "in_process": in_process,
        "parent": os.getpid(),
        "bodies": None if bodies is None else str(bodies.absolute()),
    }
    command = [sys.executable, "-m", "dataloaderjob.local.remake"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        try:
            _ask(child, order)
            for batch in wanted:
                answer = _ask(child, [batch.row.ticket, batch.piece.ticket(batch.row).hex()])
                body = Path(answer["body"]) if answer["body"] else None
                yield Result(batch=batch, digest=answer["digest"], error=answer["error"], body=body)
        finally:
            child.kill()


def _ask(child: subprocess.Popen[bytes], what: Any) -> dict[str, Any]:
    """The child's answer to a line of JSON. Raises InputError where it has none."""
    assert child.stdin is not None  # noqa: S101  asked for above
    assert child.stdout is not None  # noqa: S101
    answer: dict[str, Any] = {"failed": "the process that made them ended"}
    with contextlib.suppress(BrokenPipeError):
        child.stdin.write(json.dumps(what).encode() + b"\n")
        child.stdin.flush()
    line = child.stdout.readline()
    if line.endswith(b"\n"):
        answer = json.loads(line)
    if "failed" in answer:
        raise InputError(f"recorded batches cannot be made again here: {answer['failed']}")
    return answer


# The child


def main() -> int:
    """Answers each line of standard input by one on standard output, which user code gets to see neither of."""
    with os.fdopen(os.dup(0)) as orders, os.fdopen(os.dup(1), "w", buffering=1) as answers:
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        try:
            for answer in _answers(orders):
                answers.write(json.dumps(answer) + "\n")
        except Exception as exc:  # user code, when it is loaded
            answers.write(json.dumps({"failed": f"{type(exc).__name__}: {exc}"}) + "\n")
            return 1
    return 0


def _answers(orders: Iterable[str]) -> Iterator[dict[str, Any]]:
    from dataloaderjob.codec.remaking import Remaker
    from dataloaderjob.core.blobs import BlobStore, Bundle

    lines = map(json.loads, orders)
    order = next(lines)
    die_with_parent(order["parent"])
    bundle = Bundle.parse(order["bundle"].encode())
    remaker = Remaker(bundle, BlobStore(Path(order["blobs"])), in_process=order["in_process"])
    yield {}
    for at, (number, payload) in enumerate(lines):
        remade = remaker.make(number, bytes.fromhex(payload))
        error = "" if remade.error is None else f"{type(remade.error).__name__}: {remade.error}"
        body = None
        if order["bodies"] and remade.error is None:
            body = Path(order["bodies"]) / str(at)
            try:
                body.write_bytes(remaker.body(remade))
            except InputError as exc:
                body, error = None, str(exc)
        yield {"digest": remade.digest, "error": error, "body": None if body is None else str(body)}


if __name__ == "__main__":
    sys.exit(main())
