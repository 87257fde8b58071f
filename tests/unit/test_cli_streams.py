"""Commands with closed streams, other encodings, empty paths, and outputs that are no plain files."""

from __future__ import annotations

import fcntl
import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dataloaderjob.advise.command import advise
from dataloaderjob.core.errors import InputError, ServiceUnavailable
from dataloaderjob.core.places import FAILED_NAME, FOLDER_VARIABLE, LOCK_NAME
from dataloaderjob.local import forks
from dataloaderjob.local.cli import complete_streams, main
from dataloaderjob.local.outputs import write_output
from dataloaderjob.trainer.session import private


@pytest.mark.parametrize(("words", "code"), [("version", 0), ("run missing.yaml", 2), ("report missing", 2)])
@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_command_with_a_closed_stream_keeps_its_exit_code(
    words: str, code: int, closed: str, tmp_path: Path
) -> None:
    command = f"exec {sys.executable} -m dataloaderjob {words} {closed}"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_any_text_is_printed_in_any_encoding(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    complete_streams()
    sys.stdout.write("3.2 ± 0.1, ≥ 4")
    sys.stdout.flush()
    assert raw.getvalue().startswith(b"3.2 ")
    assert raw.getvalue().endswith(b" 4")


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--record", "", "x.yaml"), ("report", "-o", ""), ("verify", ""), ("replay", ""),
        ("map", "s.py", "d", "f", "--output", ""),
    ],
    ids=lambda words: words[0],
)  # fmt: skip
def test_empty_path_is_refused(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert "must not be empty; is a shell variable unset?" in capsys.readouterr().err


def test_url_of_a_manifest_is_refused_with_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["run", "https://example.com/job.yaml"])
    assert "is the URL https://example.com/job.yaml: download it first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("link_gbit", -3.0, "--link must be a bandwidth above 0"), ("link_gbit", 0.0, "--link must be"),
        ("link_gbit", float("nan"), "--link must be"), ("timeout_s", 0.0, "--timeout must be from 1"),
        ("timeout_s", float("nan"), "--timeout must be"), ("timeout_s", -5.0, "--timeout must be"),
        ("steps", 4, "--steps must be from 5"),
    ],
)  # fmt: skip
def test_impossible_number_for_advise_is_refused(option: str, value: float, message: str) -> None:
    options = {"steps": 50, "timeout_s": 90.0, "link_gbit": None, "as_json": False, option: value}
    with pytest.raises(InputError, match=message):
        advise(["python", "train.py"], **options)  # type: ignore[arg-type]


def test_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_output(pipe, "text")
        assert os.read(reader, 100) == b"text"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
    write_output("/dev/null", "text")
    assert Path("/dev/null").is_char_device()


def test_file_behind_standard_output_is_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "all.yaml"
    path.write_text("before\n")
    with path.open("a") as file:
        write_output(f"/proc/{os.getpid()}/fd/{file.fileno()}", "after\n")
    assert path.read_text() == "before\nafter\n"


def test_link_is_kept_and_its_target_keeps_its_mode(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("before")
    target.chmod(0o640)
    link.symlink_to("target")
    write_output(link, "after")
    assert link.is_symlink()
    assert target.read_text() == "after"
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(os.listdir(tmp_path)) == ["link", "target"]


@pytest.mark.parametrize("name", ["", "missing/x"])
def test_output_that_cannot_be_written_is_named_with_the_remedy(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"cannot be written .*: name a file in a folder that exists"):
        write_output(name, "text")


def test_folder_that_cannot_be_created_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/etc/passwd")
    with pytest.raises(ServiceUnavailable, match=r"/etc/passwd/\w+ of the feeders .*: set DATALOADERJOB_DIR"):
        private.folder()


def test_temporary_folder_with_a_long_path_gives_way_to_tmp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", f"/tmp/{'x' * 100}")
    assert private._default_base() == Path(f"/tmp/dataloaderjob-{os.getuid()}")


def test_folders_of_failed_services_are_removed_after_a_while(tmp_path: Path) -> None:
    for name, age_s in (("old", 2 * private._STALE_S), ("locked", 2 * private._STALE_S), ("new", 0.0)):
        home = tmp_path / name
        private.folders.make(home, "")
        private.folders.mark(home)
        (home / FAILED_NAME).write_text("why")
        (home / LOCK_NAME).touch()
        then = (home / FAILED_NAME).stat().st_mtime - age_s
        os.utime(home / FAILED_NAME, (then, then))
    with (tmp_path / "locked" / LOCK_NAME).open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        private._remove_failed(tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["locked", "new"]


def test_deleted_working_folder_gives_way_to_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    assert forks._folder() == "/"
