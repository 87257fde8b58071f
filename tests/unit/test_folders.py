"""Folders, sockets and links that another user of the machine has laid where ours belong."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from other_user import OTHER_UID, as_other, needs_root, start_as_other
from rig import until

from dataloaderjob.core import folders, ipc, places
from dataloaderjob.core.errors import ProtocolError, ServiceUnavailable
from dataloaderjob.local import reaper
from dataloaderjob.providers.local import _dial
from dataloaderjob.sidecar.listeners import TrainerListener, listen
from dataloaderjob.trainer.session import attach, private


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder as /tmp is, for all users."""
    with tempfile.TemporaryDirectory(prefix="dlj") as folder:
        os.chmod(folder, 0o1777)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        for name in ("DATALOADERJOB_DIR", "XDG_RUNTIME_DIR", "DATALOADERJOB_SOCKET"):
            monkeypatch.delenv(name, raising=False)
        yield Path(folder)


@pytest.fixture
def base(shared: Path) -> Path:
    """Where the private service's folders belong."""
    return shared / f"dataloaderjob-{os.getuid()}"


def kept(folder: Path) -> Path:
    """A folder of ours with a file that must stay."""
    folder.mkdir()
    (folder / "precious").write_text("mine")
    return folder


def test_folder_of_a_private_service_is_accessible_to_its_user_only(base: Path):
    made = private.folder()
    assert made.parent == base
    assert [stat.S_IMODE(path.stat().st_mode) for path in (base, made)] == [0o700, 0o700]
    assert private.folder() == made, "and is found again"


@needs_root
def test_folder_created_first_by_another_user_is_refused_and_left_empty(base: Path):
    as_other(lambda: (os.umask(0), os.mkdir(base, 0o777)))
    with pytest.raises(ServiceUnavailable) as refused:
        private.start(1)
    assert f"but is a folder of user {OTHER_UID}: set DATALOADERJOB_DIR" in str(refused.value)
    assert os.listdir(base) == []


@needs_root
def test_link_placed_by_another_user_is_refused_and_not_followed(base: Path, shared: Path):
    victim = kept(shared / "victim")
    as_other(lambda: os.symlink(victim, base))
    with pytest.raises(ServiceUnavailable, match=f"but is a symbolic link of user {OTHER_UID}"):
        private.start(1)
    assert os.listdir(victim) == ["precious"]


def test_a_link_in_place_of_a_run_s_folder_is_refused_and_not_followed(base: Path, shared: Path):
    victim = kept(shared / "victim")
    base.mkdir(mode=0o700)
    (base / private.run_key()).symlink_to(victim)
    with pytest.raises(ServiceUnavailable, match="but is a symbolic link"):
        private.start(1)
    assert os.listdir(victim) == ["precious"]


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o702])
def test_folder_writable_by_others_is_refused(base: Path, mode: int):
    base.mkdir()
    base.chmod(mode)
    with pytest.raises(ServiceUnavailable, match=rf"others can write to \(mode 0{mode:o}\)"):
        private.folder()
    assert os.listdir(base) == []


def test_a_folder_in_which_others_may_rename_is_refused(shared: Path, base: Path):
    shared.chmod(0o777)
    with pytest.raises(ServiceUnavailable, match="others can rename its contents"):
        private.folder()
    assert not base.exists()


@needs_root
def test_configured_folder_of_another_user_is_refused(shared: Path, monkeypatch: pytest.MonkeyPatch):
    theirs = shared / "theirs"
    as_other(lambda: (os.umask(0), os.mkdir(theirs, 0o777)))
    monkeypatch.setenv("DATALOADERJOB_DIR", str(theirs))
    with pytest.raises(ServiceUnavailable, match=f"belongs to user {OTHER_UID}"):
        private.folder()
    assert os.listdir(theirs) == []


def test_private_runtime_folder_of_the_login_is_preferred(
    shared: Path, base: Path, monkeypatch: pytest.MonkeyPatch
):
    runtime = shared / "runtime"
    runtime.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    assert private.folder().parent == runtime / "dataloaderjob"
    runtime.chmod(0o755)
    assert private.folder().parent == base
    runtime.chmod(0o700)
    (shared / "link").symlink_to(runtime)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(shared / "link"))
    assert private.folder().parent == base


def test_only_marked_folders_and_named_files_are_removed(shared: Path):
    folder = kept(shared / "folder")
    (folder / "s").write_text("")
    folders.remove(folder, places.FILES)
    folders.remove_tree(folder)
    assert sorted(os.listdir(folder)) == ["precious", "s"], "it has no mark"
    folders.mark(folder)
    folders.remove(folder, places.FILES)
    assert os.listdir(folder) == ["precious"], "what is not ours stays"
    (folder / "precious").unlink()
    folders.mark(folder)
    folders.remove(folder, places.FILES)
    assert not folder.exists()


def test_removal_never_follows_a_link(shared: Path):
    victim = kept(shared / "victim")
    folders.mark(victim)
    home, swapped = shared / "home", shared / "swapped"
    home.mkdir()
    folders.mark(home)
    (home / "r1").symlink_to(victim)
    swapped.symlink_to(victim)
    for removed in (folders.remove_tree, lambda p: folders.remove(p, ["precious"])):
        removed(swapped)
    folders.remove_child(home, "r1")
    folders.remove_tree(home)
    assert not home.exists()
    assert (victim / "precious").read_text() == "mine"
    reaper.give_up(swapped, 1)
    assert (victim / "precious").exists()


@contextlib.contextmanager
def theirs(path: Path, kind: socket.SocketKind) -> Iterator[Path]:
    """A socket of another user's at `path`; yields the file with what was sent there before the end."""
    heard = path.with_name("heard")

    def serve() -> None:
        with socket.socket(socket.AF_UNIX, kind) as sock:
            sock.bind(str(path))
            path.chmod(0o777)
            sock.listen()
            while True:
                peer, _ = sock.accept()
                data = peer.recv(1 << 16)
                heard.write_bytes(data)

    pid = start_as_other(serve)
    try:
        until(lambda: path.exists() and path.stat().st_mode & 0o777 == 0o777)
        time.sleep(0.05)
        yield heard
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@needs_root
def test_socket_of_another_user_in_the_sidecars_place_receives_nothing(
    shared: Path, monkeypatch: pytest.MonkeyPatch
):
    path = shared / "s"
    with theirs(path, socket.SOCK_SEQPACKET) as heard:
        with pytest.raises(
            ServiceUnavailable, match=f"but belongs to user {OTHER_UID}: set DATALOADERJOB_DIR"
        ):
            attach.attach(str(path), "0", None, [])
        until(heard.exists)
        assert heard.read_bytes() == b"", "the connection ended without a word"
        monkeypatch.setenv("DATALOADERJOB_SOCKET", str(path))
        attach.dial(str(path)).close()  # announced by the job: a sidecar of a pod may be another user's


@needs_root
def test_feeder_host_of_another_user_receives_nothing(shared: Path):
    path = shared / "f"
    with theirs(path, socket.SOCK_STREAM) as heard:
        with pytest.raises(ProtocolError, match=f"belongs to user {OTHER_UID}"):
            _dial(str(path))
        until(heard.exists)
        assert heard.read_bytes() == b""


@needs_root
@pytest.mark.parametrize("is_private", [True, False])
def test_private_sidecar_accepts_no_other_user(shared: Path, is_private: bool):
    path = shared / "s"
    select = selectors.DefaultSelector()
    came: list[ipc.Packet] = []
    listener = TrainerListener(str(path), select, lambda _, packet: came.append(packet), private=is_private)
    path.chmod(0o777)

    def ask() -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            sock.settimeout(5)
            sock.connect(str(path))
            try:
                sock.send(ipc.pack_json(ipc.Type.STATUS, {})[0])
                (shared / "answer").write_bytes(sock.recv(1 << 16))
            except OSError as exc:
                (shared / "answer").write_text(f"{exc}")

    (shared / "answer").touch()
    (shared / "answer").chmod(0o666)
    pid = start_as_other(ask)
    try:
        while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) and not came:
            for key, _ in select.select(0.05):
                key.data()
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        listener.close()
    assert bool(came) is not is_private
    if is_private:
        told = ipc.parse_json(ipc.unpack((shared / "answer").read_bytes()).payload)
        assert told == {
            "error": f"this sidecar serves only user 0, but the process belongs to user {OTHER_UID}"
        }


def test_socket_appears_in_the_folder_only_once_it_listens(shared: Path, monkeypatch: pytest.MonkeyPatch):
    path = str(shared / "s")
    seen: list[bool] = []
    before = socket.socket.listen

    def looking(sock: socket.socket, *args: int) -> None:
        seen.append(os.path.exists(path))
        before(sock, *args)

    monkeypatch.setattr(socket.socket, "listen", looking)
    listen(path).close()
    assert seen == [False]
    assert os.listdir(shared) == ["s"]
