"""The command where something that it needs is not installed, or an option makes no sense."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from dataloaderjob import __version__
from dataloaderjob.core.errors import InputError, RemoteProtocolError, ServiceUnavailable
from dataloaderjob.local import cli, subcommands


def test_run_without_pydantic_names_the_packages_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in [name for name in sys.modules if name.startswith("dataloaderjob.api")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    assert cli.main(["run", "--provider", "local", str(tmp_path / "job.yaml")]) == 2
    assert "'dataloaderjob[trainer,cli]' for --provider local" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["a", "b", "--sample", "3"], ["a", "--sample", "0"]], ids=["two-records", "zero"]
)
def test_sample_option_needs_one_record_and_a_positive_number(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["verify", *words]) == 2
    assert "--sample must be at least 1, and applies only to a single record" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        OSError(5, "Input/output error"), RemoteProtocolError("no bundle"), ServiceUnavailable("nobody there"),
        InputError("no record"), ModuleNotFoundError("no module"), struct.error("too short"),
    ],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["verify", "a"], "verify.check"),
        (["verify", "a", "b"], "verify.compare"),
        (["replay", "a", "--epoch", "0", "--batch", "0"], "replay.Replay"),
    ],
)
def test_verify_and_replay_exit_with_2_for_an_error(
    words: list[str],
    name: str,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(f"dataloaderjob.local.{name}", fails)
    assert cli.main(words) == 2
    assert str(error) in capsys.readouterr().err


@pytest.mark.parametrize(("equal", "code"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("words", [["a"], ["a", "b"]], ids=["dataset", "two-records"])
def test_verify_exit_code_reflects_its_finding(
    words: list[str], equal: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("check", "compare"):
        monkeypatch.setattr(f"dataloaderjob.local.verify.{name}", lambda *_, **__: (equal, ["a line"]))
    assert cli.main(["verify", *words]) == code


@pytest.mark.parametrize("words", [[], ["a", "b", "c"], ["a", "--epoch", "x"]])
def test_verify_exits_with_2_for_wrong_arguments(words: list[str]) -> None:
    with pytest.raises(SystemExit) as found:
        cli.main(["verify", *words])
    assert found.value.code == 2


@pytest.mark.parametrize("command", ["verify", "replay"])
def test_help_warns_that_recorded_code_is_run(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    assert "use only records that you trust" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", [["--version"], ["version"]])
def test_package_runs_as_a_command_and_prints_its_version(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "dataloaderjob", *words], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"dataloaderjob {__version__}\n"


def test_broken_pipe_of_a_service_is_reported_as_an_error(monkeypatch, capsys):
    def broken(_: object) -> int:
        raise BrokenPipeError("the run closed its socket")

    monkeypatch.setattr(subcommands, "version", broken)
    assert cli.main(["version"]) == cli.EXIT_FAILED
    assert "the run closed its socket" in capsys.readouterr().err


def test_silent_command_succeeds_without_standard_output(monkeypatch):
    monkeypatch.setattr(subcommands, "version", lambda _: 0)
    monkeypatch.setattr(sys, "stdout", None)
    assert cli.main(["version"]) == 0


def test_closed_standard_output_ends_a_command_quietly():
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "dataloaderjob", "version"], stdout=write, stderr=subprocess.PIPE, timeout=60
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")
