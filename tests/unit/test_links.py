"""Links and files that another user planted in a folder where our tools write: nothing is written through them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from other_user import OTHER_UID, needs_root

from dataloaderjob.core import folders, imported, settings
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.consumption import Consumption
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.settings import RayTuning
from dataloaderjob.local.replay import Replay
from dataloaderjob.local.run import recorded
from dataloaderjob.supervisor import main as supervisor
from dataloaderjob.trainer.resume import recording
from dataloaderjob.trainer.resume.recording import Recorder

DIGEST = "0" * 64


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    """A file of ours elsewhere, to which a planted link leads."""
    found = tmp_path / "victim"
    found.write_bytes(b"mine")
    return found


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A folder in which others may write."""
    found = tmp_path / "shared"
    found.mkdir(mode=0o777)
    return found


def replayed(path: Path) -> None:
    replay = Replay.__new__(Replay)
    replay.remade = type("Made", (), {"error": None, "batch": torch.ones(1)})()
    replay.save(path)


def with_lock(path: Path) -> None:
    with BlobStore(path.parent).lock(DIGEST):
        pass


WRITES: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "replay-output": ("batch.pt", lambda path: replayed(path)),
    "blob-lock": (f".lock-{DIGEST}", with_lock),
    "settings": (f".settings.{os.getpid()}", lambda path: settings.dump(RayTuning(), path.with_name("settings"))),
    "desired": (f".desired.{os.getpid()}", lambda path: supervisor._write_desired(path.with_name("desired"), 3)),
    "imported": ("imported.part", lambda path: imported.record(path.with_name("imported"))),
    "file": ("any", lambda path: os.close(folders.open_file(path, os.O_WRONLY | os.O_TRUNC, InputError))),
    "new": ("any", lambda path: os.write(folders.open_new(path, os.O_WRONLY), b"theirs")),
    "whole": (f".any.{os.getpid()}", lambda path: folders.write(path.with_name("any"), b"theirs")),
}  # fmt: skip


@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_written_through_a_link(name: str, shared: Path, victim: Path) -> None:
    place, write = WRITES[name]
    (shared / place).symlink_to(victim)
    with contextlib.suppress(InputError, OSError):  # or it replaces the link
        write(shared / place)
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("place", ["rank-0", "blobs"])
def test_a_record_leaves_no_file_behind_a_link(place: str, shared: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (shared / place).symlink_to(elsewhere)
    with pytest.raises(InputError, match="must be a real folder"):
        Recorder(shared, "0")
    assert list(elsewhere.iterdir()) == []


def test_a_record_stays_in_its_folder_if_a_link_takes_its_place(shared: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    recorder = Recorder(shared, "0")
    for name in ("rank-0", "blobs"):
        (shared / name).rename(shared / f"{name}-moved")
        (shared / name).symlink_to(elsewhere)
    store = BlobStore(tmp_path / "store")
    digest, nbytes = store.put(b"code")
    recorder.keep(Bundle(blobs=((digest, nbytes),), allow_pickle=False, facts={}), store)
    recorder.add((0, 0, 0, 1, 2), 0, 0, b"ticket")
    recorder.flush()
    assert list(elsewhere.iterdir()) == []
    assert (shared / "blobs-moved" / digest).read_bytes() == b"code"
    assert len(list((shared / "rank-0-moved").iterdir())) == 3


def test_a_record_that_cannot_be_safe_does_not_end_the_training(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (shared / "rank-0").symlink_to(tmp_path)
    monkeypatch.setenv("DATALOADERJOB_RECORD", str(shared))
    monkeypatch.setattr(recording, "_recorder", None)
    monkeypatch.setattr(recording, "_failed", False)
    assert recording.recorder(Consumption()) is None
    assert "cannot record to" in capfd.readouterr().err


def test_a_copied_blob_replaces_a_planted_link(
    shared: Path, victim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_link(*_: Any, **__: Any) -> None:
        raise OSError("another device")

    monkeypatch.setattr(os, "link", no_link)
    source = shared / "source"
    source.write_bytes(b"blob")
    (shared / f".{DIGEST}-{os.getpid()}").symlink_to(victim)
    recording._link(source, shared / DIGEST)
    assert (victim.read_bytes(), (shared / DIGEST).read_bytes()) == (b"mine", b"blob")


def test_a_link_is_no_blob(shared: Path, victim: Path) -> None:
    (shared / DIGEST).symlink_to(victim)
    assert not BlobStore(shared).has(DIGEST, 4)


def test_a_fifo_is_no_output_and_does_not_block(shared: Path) -> None:
    os.mkfifo(shared / "batch.pt")
    with pytest.raises(InputError, match="must be a regular file"):
        replayed(shared / "batch.pt")


@needs_root
def test_a_link_of_another_user_is_no_folder(shared: Path, tmp_path: Path) -> None:
    planted = shared / "record"
    planted.symlink_to(tmp_path)
    os.lchown(planted, OTHER_UID, OTHER_UID)
    with pytest.raises(InputError, match=f"but is a link of user {OTHER_UID}"):
        Recorder(planted, "0")
    with pytest.raises(InputError, match=f"but is a link of user {OTHER_UID}"):
        recorded(None, planted)  # type: ignore[arg-type]  it is refused before the plan is read


def test_a_link_of_ones_own_leads_to_the_folder(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "short").symlink_to(shared)
    Recorder(tmp_path / "short", "0")
    assert sorted(path.name for path in shared.iterdir()) == ["blobs", "rank-0"]
