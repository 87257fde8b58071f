"""A private service that stays for the next script: which script may take it, and for how long it waits."""

import os
import resource
import sys
import types
from pathlib import Path

import pytest

import dataloaderjob
from dataloaderjob.core import imported
from dataloaderjob.core.claims import Claim
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.keep import keep_seconds
from dataloaderjob.local.service import LINGER_S, IdleShutdown
from dataloaderjob.shipping import process_state
from dataloaderjob.trainer.session import keeping

CLAIM = Claim(run="ab12", pid=7, keep_s=600.0, script="train.py")


def test_claim_round_trips():
    assert Claim.parse(CLAIM.pack()) == CLAIM


@pytest.mark.parametrize(
    "text",
    [
        b"feeders",
        b"[]",
        b"{}",
        b'{"run": "a", "pid": null}',
        b"\xff",
        b"",
        b"[" * 8000,
        b'{"run": "a", "pid": Infinity}',
    ],
)
def test_malformed_claim_is_ignored(text):
    assert Claim.parse(text) is None


@pytest.mark.parametrize(("text", "seconds"), [("", 0), ("0", 0), ("600", 600), ("0.5", 0.5)])
def test_keep_variable_sets_the_seconds(monkeypatch, text, seconds):
    monkeypatch.setenv("DATALOADERJOB_KEEP", text)
    assert keep_seconds() == seconds


@pytest.mark.parametrize("text", ["10m", "-1", "nan", "inf", "1e9", "yes"])
def test_invalid_keep_variable_is_refused_by_name(monkeypatch, text):
    monkeypatch.setenv("DATALOADERJOB_KEEP", text)
    with pytest.raises(InputError, match=f"DATALOADERJOB_KEEP must be the number of seconds .*'{text}'"):
        keep_seconds()


@pytest.mark.parametrize(
    ("name", "matters"),
    [
        ("LOCAL_RANK", False),
        ("MASTER_PORT", False),
        ("SHLVL", False),
        ("TERM", False),
        ("DATALOADERJOB_KEEP", False),
        ("DATA_ROOT", True),
        ("MASTER_SEED", True),
        ("OMP_NUM_THREADS", True),
        ("LD_PRELOAD", True),
        ("PYTHONHASHSEED", True),
        ("LOCAL_WORLD_SIZE", True),
        ("CUDA_VISIBLE_DEVICES", True),
    ],
)
def test_variable_matters_unless_it_belongs_to_the_launch(name, matters):
    plain = {"HOME": "/root"}
    same = keeping.environment_key({**plain, name: "1"}) == keeping.environment_key(plain)
    assert same is not matters


def test_any_file_of_this_package_changes_the_environment_key_when_edited():
    found = {
        str(Path(file).relative_to(Path(dataloaderjob.__file__).parent)) for file in keeping._own_files()
    }
    assert {"__init__.py", "feeder/server.py", "local/service.py", "trainer/loader.py"} <= found


@pytest.mark.parametrize(
    ("name", "travels"),
    [
        ("SLURM_JOB_ID", True),
        ("SLURM_TMPDIR", True),
        ("OMPI_COMM_WORLD_SIZE", True),
        ("RAY_ADDRESS", True),
        ("SLURM_PROCID", False),
        ("SLURM_LOCALID", False),
        ("SLURM_STEP_NUM_TASKS", False),
        ("OMPI_COMM_WORLD_RANK", False),
        ("PMIX_RANK", False),
        ("PMIX_SERVER_URI41", False),
        ("RANK", False),
    ],
)
def test_launchers_variables_reach_kept_feeders_except_a_ranks(monkeypatch, name, travels):
    monkeypatch.setenv("DATALOADERJOB_KEEP", "60")
    monkeypatch.delenv("DATALOADERJOB_SOCKET", raising=False)
    monkeypatch.setenv(name, "9")
    assert (process_state.ProcessState()._chosen().get(name) == "9") is travels
    monkeypatch.delenv("DATALOADERJOB_KEEP")
    assert name not in process_state.ProcessState()._chosen(), "feeders then start with it"


def test_installed_package_changes_the_environment_key(tmp_path, monkeypatch):
    packages = tmp_path / "site-packages"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    before = keeping.environment_key({})
    (packages / "timm-1.0.dist-info").mkdir()
    os.utime(packages, ns=(1, 1))
    assert keeping.environment_key({}) != before


def test_scripts_own_folder_does_not_change_the_environment_key(tmp_path, monkeypatch):
    path, keys = list(sys.path), set()
    for folder in ("one", "other"):
        script = tmp_path / folder / "train.py"
        monkeypatch.setattr(sys.modules["__main__"], "__file__", str(script), raising=False)
        monkeypatch.setattr(sys, "path", [str(script.parent), *path])
        keys.add(keeping.environment_key({}))
    assert len(keys) == 1


def test_soft_limit_of_files_does_not_change_the_environment_key(monkeypatch):
    before, real = keeping.environment_key({}), resource.getrlimit
    monkeypatch.setattr(
        resource, "getrlimit", lambda n: (64, real(n)[1]) if n == resource.RLIMIT_NOFILE else real(n)
    )
    assert keeping.environment_key({}) == before


def test_imported_files_are_current_until_one_changes(tmp_path, monkeypatch):
    source, written = tmp_path / "timm.py", tmp_path / "imported"
    source.write_text("depth = 12")
    module = types.ModuleType("timm")
    module.__file__ = str(source)
    monkeypatch.setitem(sys.modules, "timm", module)
    assert not imported.is_current(written)
    imported.record(written)
    assert imported.is_current(written)
    source.write_text("depth = 24 ")
    assert not imported.is_current(written)


def test_fewer_processors_change_the_environment_key(monkeypatch):
    before = keeping.environment_key({})
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {99})
    assert keeping.environment_key({}) != before


def test_kept_service_ends_after_its_seconds():
    shutdown = IdleShutdown(0.0, 600.0)
    assert not shutdown.see(receivers=1, starter_alive=True, now=10.0)
    assert not shutdown.see(receivers=0, starter_alive=True, now=5_000.0), "its script lives"
    assert shutdown.free_since() is None
    assert not shutdown.see(receivers=0, starter_alive=False, now=5_001.0)
    assert shutdown.free_since() == 5_001.0
    assert not shutdown.see(receivers=0, starter_alive=False, now=5_600.0)
    assert shutdown.see(receivers=0, starter_alive=False, now=5_601.0)


def test_briefly_kept_service_still_waits_for_another_rank():
    shutdown = IdleShutdown(0.0, 0.1)
    assert not shutdown.see(receivers=1, starter_alive=False, now=10.0)
    assert not shutdown.see(receivers=0, starter_alive=False, now=10.0 + LINGER_S - 0.1)


def test_variable_that_changes_between_epochs_reaches_feeders(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is kept while the environment stays the same, so a change must be noticed."""
    state = process_state.ProcessState()
    assert "DLJ_TEST_FLAG" not in state._environ()
    for value in ("1", "2"):
        monkeypatch.setenv("DLJ_TEST_FLAG", value)
        assert state._environ()["DLJ_TEST_FLAG"] == value
    assert state._environ() is state._environ(), "not chosen anew at each epoch"
    monkeypatch.delenv("DLJ_TEST_FLAG")
    assert "DLJ_TEST_FLAG" not in state._environ()
