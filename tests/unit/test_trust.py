"""Records are code: `verify` and `replay` say whose, and run no code of a user who is not trusted."""

from __future__ import annotations

import grp
import os
import pickle
import pwd
from pathlib import Path

import pytest
from other_user import OTHER_UID, needs_root

from dataloaderjob.core import ticket_codec
from dataloaderjob.core.blobs import BlobStore, Bundle
from dataloaderjob.core.consumption import Consumption, fold
from dataloaderjob.core.errors import InputError
from dataloaderjob.local import cli, trust, verify
from dataloaderjob.local.replay import Replay
from dataloaderjob.trainer.resume.recording import Recorder, Recording


class Runs:
    """A key whose pickle runs code where it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> object:
        return os.mkdir, (str(self.path),)


def a_record(folder: Path, digest: int, ran: Path) -> Path:
    """One batch, whose code and key leave a folder where they are loaded."""
    recorder, consumption, store = (
        Recorder(folder, "0"),
        Consumption(),
        BlobStore(folder.with_suffix(".store")),
    )
    consumption.begin()
    code = store.put(pickle.dumps(Runs(ran)))
    kept = recorder.keep(Bundle(blobs=(code,), allow_pickle=False, facts={}), store)
    made = Recording(recorder, consumption, kept)
    consumption.rolling = fold(consumption.rolling, digest)
    made.ask(0, ticket_codec.pack_ticket(7, 0, [Runs(ran), digest], pickle_keys=pickle.dumps))
    made.give(0, digest, consumption.rolling)
    recorder.flush()
    return folder


def give_away(folder: Path) -> None:
    for place, folders, files in os.walk(folder):
        for name in (".", *folders, *files):
            os.lchown(Path(place, name), OTHER_UID, OTHER_UID)


def test_ones_own_record_is_trusted_and_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = a_record(tmp_path / "mine", 1, tmp_path / "ran")
    trust.check(folder)
    assert f"the code in {folder} belongs to user " in capfd.readouterr().err


@needs_root
@pytest.mark.parametrize("which", ["bundles", "tickets", "rows", "blob", "folder"])
def test_a_single_file_of_another_user_makes_a_record_foreign(which: str, tmp_path: Path) -> None:
    folder = a_record(tmp_path / "mixed", 1, tmp_path / "ran")
    found = {"blob": next((folder / "blobs").glob("?" * 64)), "folder": folder}
    path = found.get(which) or next((folder / "rank-0").glob(f"*.{which}"))
    os.chown(path, OTHER_UID, OTHER_UID)
    with pytest.raises(InputError, match=r"contains code from user nobody, who owns .*pass --trust nobody"):
        trust.check(folder)
    trust.check(folder, ["nobody"])


@pytest.mark.parametrize("name", ["rank-0", "blobs"])
def test_a_record_that_anybody_may_change_is_nobodys(name: str, tmp_path: Path) -> None:
    folder = a_record(tmp_path / "open", 1, tmp_path / "ran")
    (folder / name).chmod(0o777)
    with pytest.raises(InputError, match=r"anybody can change .*mode 0777.*chmod -R go-w"):
        trust.check(folder)
    (folder / name).chmod(0o1777)
    trust.check(folder)


SHARED_GID = 4242


@needs_root
@pytest.mark.parametrize("which", ["bundles", "tickets", "rows", "blob", "blobs", "rank-0", "folder"])
def test_a_record_that_a_group_may_change_is_refused(which: str, tmp_path: Path) -> None:
    folder = a_record(tmp_path / "shared", 1, tmp_path / "ran")
    found = {"blob": next((folder / "blobs").glob("?" * 64)), "folder": folder}
    found |= {name: folder / name for name in ("blobs", "rank-0")}
    path = found.get(which) or next((folder / "rank-0").glob(f"*.{which}"))
    os.chown(path, -1, SHARED_GID)
    path.chmod(path.stat().st_mode | 0o020)
    with pytest.raises(InputError, match=rf"group {SHARED_GID} can change {path} .*chmod -R go-w"):
        trust.check(folder)
    path.chmod(path.stat().st_mode & ~0o020)
    trust.check(folder)


def test_group_without_other_members_may_write_but_one_with_members_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = a_record(tmp_path / "own", 1, tmp_path / "ran")
    if os.getuid() == 0:  # root's own group is trusted
        os.chown(folder / "blobs", 0, 54321)
    (folder / "blobs").chmod(0o775)
    owner = trust._name(os.getuid())

    def is_group(name: str, *members: str) -> None:
        group = grp.struct_group((name, "x", (folder / "blobs").stat().st_gid, list(members)))
        monkeypatch.setattr(grp, "getgrgid", lambda _: group)

    for members in ([], [owner]):
        is_group(owner, *members)
        trust.check(folder)
    for name, *members in ([owner, owner, "eve"], ["users"], ["users", owner]):
        is_group(name, *members)
        with pytest.raises(InputError, match=f"group {name} can change"):
            trust.check(folder)
    is_group(owner)
    eve = pwd.struct_passwd(("eve", "x", 12345, (folder / "blobs").stat().st_gid, "", "/", "/bin/sh"))
    with monkeypatch.context() as patched:
        patched.setattr(pwd, "getpwall", lambda: [eve])
        with pytest.raises(InputError, match=f"group {owner} can change"):
            trust.check(folder)
    monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"])
    with pytest.raises(InputError, match="somebody on its access control list can change"):
        trust.check(folder)


def test_a_record_in_a_folder_of_anybody_is_refused(tmp_path: Path) -> None:
    (place := tmp_path / "anybodys").mkdir()
    folder = a_record(place / "in" / "mine", 1, tmp_path / "ran")
    place.chmod(0o777)
    with pytest.raises(InputError, match=rf"anybody can replace it, because {place} has mode 0777: copy"):
        trust.check(folder)
    place.chmod(0o1777)
    trust.check(folder)


def test_record_written_under_any_umask_is_changed_by_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = a_record(tmp_path / "deep" / "mine", 1, tmp_path / "ran")
    finally:
        os.umask(before)
    made = [tmp_path / "deep", folder, *folder.rglob("*")]
    assert len(made) >= 8
    assert {path.stat().st_mode & 0o022 for path in made} == {0}
    trust.check(folder)


@needs_root
def test_a_link_to_a_file_of_another_user_is_not_trusted(tmp_path: Path) -> None:
    folder = a_record(tmp_path / "linked", 1, tmp_path / "ran")
    blob = next((folder / "blobs").glob("?" * 64))
    blob.rename(tmp_path / "away")
    os.chown(tmp_path / "away", OTHER_UID, OTHER_UID)
    blob.symlink_to(tmp_path / "away")
    with pytest.raises(InputError, match="user nobody"):
        trust.check(folder)


@needs_root
def test_no_code_of_another_users_record_runs_unless_trusted(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    mine, theirs = a_record(tmp_path / "mine", 1, ran), a_record(tmp_path / "theirs", 2, ran)
    give_away(theirs)
    equal, lines = verify.compare(mine, theirs)
    assert not equal
    assert "the difference is unknown: the record" in lines[0]
    assert "pass --trust nobody" in lines[0]
    for act in (
        lambda: verify.check(theirs),
        lambda: Replay(theirs, rank="0", loader=0, epoch=0, batch=0).make(debug=False),
    ):
        with pytest.raises(InputError, match="contains code from user nobody"):
            act()
    assert not ran.exists()
    verify.compare(mine, theirs, trusted=["nobody"])
    assert ran.exists(), "with --trust it does"


@needs_root
def test_equal_records_of_two_users_are_compared_without_code(tmp_path: Path) -> None:
    mine, theirs = (a_record(tmp_path / name, 1, tmp_path / "ran") for name in ("mine", "theirs"))
    give_away(theirs)
    assert verify.compare(mine, theirs)[0]


@needs_root
@pytest.mark.parametrize(
    "command", [["verify"], ["replay", "--epoch", "0", "--batch", "0"]], ids=lambda c: c[0]
)
def test_the_commands_refuse_and_name_the_flag(
    command: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = a_record(tmp_path / "theirs", 2, tmp_path / "ran")
    give_away(theirs)
    monkeypatch.setattr("sys.argv", ["dataloaderjob", command[0], str(theirs), *command[1:]])
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(cli.main())
    assert ended.value.code == 2
    assert "pass --trust nobody if you want to run that user's code" in capfd.readouterr().err
    assert not (tmp_path / "ran").exists()


def test_a_name_that_owns_nothing_is_an_error(tmp_path: Path) -> None:
    folder = a_record(tmp_path / "mine", 1, tmp_path / "ran")
    with pytest.raises(InputError, match="--trust names somebody, who does not own anything"):
        verify.check(folder, trusted=["somebody"])
