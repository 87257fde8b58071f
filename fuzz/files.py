"""Targets: what is read from files: settings, records, manifests, files to inject, a loader's state."""

from __future__ import annotations

import atexit
import contextlib
import functools
import io
import json
import random
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import yaml
from torch.utils.data import TensorDataset

from dataloaderjob import DataLoader
from dataloaderjob.api.load import decode, parse_live, parse_manifest
from dataloaderjob.core import records, settings, ticket_codec
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.consumption import fold
from dataloaderjob.core.errors import InputError, RemoteProtocolError
from dataloaderjob.core.settings import FeederSettings, SidecarSettings, SupervisorSettings
from dataloaderjob.local import injecting
from dataloaderjob.local.mapping.messages import from_message, to_message
from fuzz.target import Target, mutate_bytes, mutate_json

EXAMPLE = Path(__file__).parents[1] / "examples/fashion-mnist/dataloaderjob.yaml"
_KINDS = (SidecarSettings, FeederSettings, SupervisorSettings)
_ROWS = 8
"""Rows of one record whose tickets and bundles are read."""


@functools.cache
def _folder() -> Path:
    """A folder for the files of this process, in memory if possible."""
    shm = Path("/dev/shm")
    made = tempfile.TemporaryDirectory(prefix="dlj-fuzz-", dir=shm if shm.is_dir() else None)
    atexit.register(made.cleanup)
    return Path(made.name)


def _settings(data: bytes) -> None:
    path = _folder() / "settings.json"
    path.write_bytes(data)
    with contextlib.redirect_stderr(io.StringIO()):
        for kind in _KINDS:
            with contextlib.suppress(InputError):
                settings.load(kind, path)


def _all_settings() -> Sequence[bytes]:
    folder = _folder()
    made = (
        SidecarSettings(job="j", socket="/s", key_path="/k", blobs="/b", feeders=[("a", "b", "c", 1)]),
        FeederSettings(job="j", key_path="/k", blob_folder="/b"),
        SupervisorSettings(
            job="j", key_path="/k", blob_folder="/b", state_path="/s", port=1, feeder_blob_folder="/f"
        ),
    )
    for one in made:
        settings.dump(one, folder / f"{type(one).__name__}.json")
    return [(folder / f"{kind.__name__}.json").read_bytes() for kind in _KINDS]


_SPLIT = b"\n--\n"


def _record(data: bytes) -> None:
    """Reads a record: rows, tickets and bundles are the parts of the input."""
    rank = _folder() / "record/rank-0"
    rank.mkdir(parents=True, exist_ok=True)
    rows, tickets, bundles = [*data.split(_SPLIT, 2), b"", b""][:3]
    for name, content in (("rows", rows), ("tickets", tickets), ("bundles", bundles)):
        (rank / f"1-2.{name}").write_bytes(content)
    record = records.Record.open(rank.parent)
    (piece,) = record.ranks["0"]
    for row in list(piece.rows())[:_ROWS]:
        for read in (piece.ticket, piece.bundle):
            with contextlib.suppress(InputError):
                read(row)
    record.batches("0")


def _records() -> Sequence[bytes]:
    ticket, rolling, rows = ticket_codec.pack_ticket(7, 0, [1, 2]), 1, b""
    for number in range(3):
        rolling = fold(rolling, 1000 + number)
        rows += records.ROW.pack(
            0, 0, number, 1000 + number, rolling, number * len(ticket), len(ticket), 0, 0
        )
    bundle = json.dumps(
        {**json.loads(Bundle(blobs=(("a" * 64, 5),)).manifest()), "in_process": False}
    ).encode()
    return [records.HEAD.pack(records.MAGIC) + rows + _SPLIT + ticket * 3 + _SPLIT + bundle + b"\n"]


def _mutate_record(data: bytes, chance: random.Random) -> bytes:
    parts = data.split(_SPLIT, 2)
    at = chance.randrange(len(parts))
    parts[at] = (mutate_json if at == 2 else mutate_bytes)(parts[at], chance)
    return _SPLIT.join(parts)


def _live(data: bytes) -> None:
    """An object as the API server sends it."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return
    if isinstance(found, dict):
        parse_live(found)


def _state(data: bytes) -> None:
    """A checkpoint that was read as JSON."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return
    loader = _loader()
    loader.load_state_dict(found)
    next(iter(loader), None)


def _loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(20)), batch_size=2, shuffle=True, num_workers=0)


def _states() -> Sequence[bytes]:
    loader = _loader()
    found = [loader.state_dict()]
    batches = iter(loader)
    next(batches)
    found.append(loader.state_dict())
    return [json.dumps(one).encode() for one in found]


def _results(data: bytes) -> None:
    """What `map` gets from feeders: every value of a batch that it takes can be read."""
    from_message(np.frombuffer(data, np.uint8)).to_pylist()


def _messages() -> Sequence[bytes]:
    columns = {"text": ["x", "yy", None], "list": [[1, 2], [3], []], "number": np.arange(3.0)}
    nested = {
        "struct": pa.array([{"a": 1, "b": ["c"]}] * 3),
        "words": pa.array(["a", "b", "a"]).dictionary_encode(),
    }
    return [to_message(pa.record_batch(one)).tobytes() for one in (columns, nested)]


_REFUSED = (InputError,)
_JOB = {
    "apiVersion": "dataloading.dev/v1alpha1", "kind": "DataLoaderJob", "metadata": {"name": "bert"},
    "spec": {"feeders": {"image": "x"}, "trainers": {"attach": {}}},
}  # fmt: skip
_POD: dict[str, Any] = {
    "metadata": {"labels": {"dataloading.dev/inject": "bert"}, "annotations": {"a": "b"}},
    "spec": {
        "containers": [
            {
                "name": "train", "image": "x", "env": [{"name": "A", "value": "22:30"}],
                "resources": {"limits": {"cpu": 1, "nvidia.com/gpu": "8"}},
                "volumeMounts": [{"name": "d", "mountPath": "/d"}], "ports": [{"containerPort": 80}],
            },
            {"name": "log", "image": "y"},
        ],
        "volumes": [{"name": "d", "emptyDir": {}}], "initContainers": [{"name": "wait", "image": "z"}],
        "securityContext": {"runAsUser": 0},
    },
}  # fmt: skip


def _inject(data: bytes) -> None:
    """Injects the pods of a file, which is idempotent and keeps all characters."""
    request = injecting.Request(source="fuzz")
    text = decode(data, "fuzz")
    once = injecting.injected_text(text, request)
    twice = injecting.injected_text(once.text, request)
    if twice.text != once.text:
        raise AssertionError("injecting twice differs from injecting once")


def _files_to_inject() -> Sequence[bytes]:
    job = {"apiVersion": "batch/v1", "kind": "Job", "spec": {"template": _POD}}
    both = {"apiVersion": "v1", "kind": "List", "items": [_JOB, job]}
    styles: tuple[dict[str, Any], ...] = (
        {},
        {"default_flow_style": True},
        {"default_flow_style": True, "width": 20},
    )
    made = [json.dumps(both), json.dumps(both, indent=2)]
    made += [yaml.safe_dump_all([_JOB, job], sort_keys=False, **style) for style in styles]
    return [text.encode() for text in made]


TARGETS = (
    Target(
        name="injected-files", parse=_inject, seeds=_files_to_inject, declared=_REFUSED, mutate=mutate_json
    ),
    Target(name="settings", parse=_settings, seeds=_all_settings, declared=(), mutate=mutate_json),
    Target(
        name="map-messages",
        parse=_results,
        seeds=_messages,
        declared=(RemoteProtocolError, ValueError, OverflowError, pa.ArrowException),
    ),
    Target(name="records", parse=_record, seeds=_records, declared=_REFUSED, mutate=_mutate_record),
    Target(name="manifests", parse=parse_manifest, seeds=lambda: [EXAMPLE.read_bytes()], declared=_REFUSED),
    Target(
        name="live-objects",
        parse=_live,
        seeds=lambda: [json.dumps(yaml.safe_load(EXAMPLE.read_text())).encode()],
        declared=_REFUSED,
        mutate=mutate_json,
    ),
    Target(
        name="states", parse=_state, seeds=_states, declared=_REFUSED, mutate=mutate_json, max_nbytes=1 << 16
    ),
)
