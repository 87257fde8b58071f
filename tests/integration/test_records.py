"""Recorded runs, compared with each other and with their dataset, and single batches made again."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGKILL

import pytest
import torch
import warm
from rig import Rig

from dataloaderjob.core.records import Record
from dataloaderjob.trainer.resume.recording import FLUSH_ROWS

SCRIPT = Path(__file__).parents[1] / "support" / "recorded_run.py"


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


def start(*args: str, folder: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    record = {} if folder is None else {"DATALOADERJOB_RECORD": str(folder)}
    return warm.run(args, env={**os.environ, **record, **env}, cwd=folder.parent if folder else None)


@pytest.fixture(scope="module")
def consume(tmp_path_factory: pytest.TempPathFactory, rig: Rig) -> Callable[..., Path]:
    """Runs the script, once with these arguments, and returns the folder of its record."""

    @functools.cache
    def run(*args: str, code: int = 0) -> Path:
        folder = tmp_path_factory.mktemp("run") / "record"
        done = start(str(SCRIPT), *args, folder=folder)
        assert done.returncode == code, done.stderr
        return folder

    return run


HERE = ("--workers", "0")


def cli(*args: object, code: int, stdin: str = "") -> str:
    done = warm.run(["-m", "dataloaderjob.local.cli", *args], stdin=stdin)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def said_by(output: str) -> tuple[list[str], list[str]]:
    """Lines about whose code ran, and the other lines."""
    lines = output.splitlines()
    owners = [line for line in lines if line.startswith("[dataloaderjob] the code in ")]
    return owners, [line for line in lines if line not in owners]


@pytest.mark.thorough
def test_run_over_feeders_equals_in_process_run_and_its_dataset(consume) -> None:
    feeders, here = consume(), consume(*HERE)
    assert cli("verify", feeders, here, code=0) == "equal: 16 batches of 1 rank\n"
    assert "equal: 16 batches of 1 rank, rebuilt" in cli("verify", feeders, code=0)
    assert "equal: 3 batches of 1 rank, rebuilt" in cli(
        "verify", here, "--epoch", "1", "--sample", "3", code=0
    )


def test_without_the_variable_no_record_is_written_and_digests_are_equal(consume, tmp_path: Path) -> None:
    recorded = start(str(SCRIPT), *HERE, folder=tmp_path / "on", RANK="3").stdout
    assert start(str(SCRIPT), *HERE).stdout == recorded != ""
    assert [path.name for path in tmp_path.iterdir()] == ["on"]
    assert sorted(path.name for path in (tmp_path / "on").iterdir()) == ["blobs", "rank-3"]


def test_one_different_key_is_reported_with_its_batch(consume) -> None:
    one, other = consume(), consume("--swap", "9", *HERE)
    assert cli("verify", one, other, code=1) == (
        "rank 0, loader 0, epoch 1, batch 2: the keys differ: key number 1 is 9 in one and 21 in the other\n"
    )
    assert "equal: 8 batches" in cli("verify", one, other, "--epoch", "0", code=0)


def test_different_content_of_one_sample_is_reported_with_its_leaf(consume) -> None:
    one, other = consume(), consume("--wrong", "13", *HERE)
    owners, said = said_by(cli("verify", one, other, code=1))
    assert [
        f"the code in {folder} belongs to user" in line
        for folder, line in zip((one, other), owners, strict=True)
    ]
    where = "rank 0, loader 0, epoch 0, batch 3: "
    assert said[0] == where + "the keys are the same, but the content differs"
    assert said[1].startswith(where + "batch['image'][1, 1, 2] is 1")
    assert said[1].endswith(" in one and 100.0 in the other (1 of 24 elements of batch['image'] differ)")


@pytest.mark.thorough
def test_different_seed_is_reported_with_the_content(consume) -> None:
    one, other = consume(), consume("--seed", "1", *HERE)
    said = cli("verify", one, other, code=1)
    assert "rank 0, loader 0, epoch 0, batch 0: the keys are the same, but the content differs" in said
    assert "the seeds differ" in said


def test_run_that_ended_early_lacks_a_bounded_number_of_batches(consume) -> None:
    whole, killed = consume(*HERE), consume("--kill-at", "10", *HERE, code=-SIGKILL)
    assert f"{whole} has this batch, but {killed} does not" in cli("verify", whole, killed, code=1)
    found = Record.open(killed).batches("0") if list(killed.glob("*/*.rows")) else {}
    assert 10 - sum(map(len, found.values())) <= FLUSH_ROWS


def test_run_resumed_in_its_folder_equals_an_uninterrupted_one(consume, tmp_path: Path) -> None:
    record, state = tmp_path / "record", tmp_path / "state"
    whole = start(str(SCRIPT), *HERE, "--epochs", "3", folder=tmp_path / "whole").stdout
    for epochs in (1, 3):  # an epoch, and then the rest
        done = start(str(SCRIPT), *HERE, "--epochs", str(epochs), "--state", str(state), folder=record)
    assert done.stdout == whole != ""
    assert cli("verify", tmp_path / "whole", record, code=0) == "equal: 24 batches of 1 rank\n"


@pytest.mark.thorough
@pytest.mark.cover(1)
@pytest.mark.parametrize("kill_at", [10, 15], ids=["first-loader", "second-loader"])
@pytest.mark.parametrize("workers", [(), HERE], ids=["feeders", "in-process"])
@pytest.mark.quick("feeders")
def test_run_killed_after_a_checkpoint_has_a_full_record_once_resumed(
    consume, tmp_path: Path, workers: tuple[str, ...], kill_at: int
) -> None:
    record, state = tmp_path / "record", tmp_path / "state"
    args = (str(SCRIPT), *workers, "--state", str(state))
    killed = start(*args, "--kill-at", str(kill_at), folder=record)
    assert killed.returncode == -SIGKILL, killed.stderr
    assert sum(map(len, Record.open(record).batches("0").values())) == kill_at
    resumed = start(*args, folder=record)
    assert resumed.returncode == 0, resumed.stderr
    assert cli("verify", consume(*HERE), record, code=0) == "equal: 16 batches of 1 rank\n"
    assert "equal: 16 batches of 1 rank, rebuilt" in cli("verify", record, code=0)


@pytest.mark.thorough
def test_failed_batch_is_recorded_and_made_again(consume) -> None:
    feeders, here = consume("--failing", "9"), consume("--failing", "9", *HERE)
    assert "equal: 16 batches" in cli("verify", feeders, here, code=0)
    assert "equal: 16 batches" in cli("verify", feeders, code=0)
    assert "next() raised an error in" in cli("verify", feeders, consume(), code=1)
    said = cli("replay", feeders, "--epoch", "0", "--batch", "2", code=0)
    assert "LookupError: no picture 9" in said
    assert "it is an error of the type that next() raised" in said


@pytest.mark.parametrize("workers", [(), ("--workers", "0")], ids=["feeders", "in-process"])
def test_replayed_batch_equals_the_consumed_one(consume, tmp_path: Path, workers: tuple[str, ...]) -> None:
    record, file = consume(*workers), tmp_path / "batch.pt"
    said = cli("replay", record, "--epoch", "1", "--batch", "2", "--output", file, code=0).splitlines()
    assert said[0].startswith("loader 0, epoch 1, batch 2: indices [8, 9, 10, 11], seed ")
    assert said[1:3] == [
        "batch['image']: tensor float32 [4, 2, 3]",
        "batch['label']: ['picture 8', 'picture 9', 'picture 10', 'picture 11']",
    ]
    assert said[3].endswith(": it is what was consumed")
    batch = torch.load(file)
    assert batch["label"][0] == "picture 8"
    assert batch["image"].shape == (4, 2, 3)


def test_a_replay_under_the_debugger_stops_where_a_sample_is_made(consume) -> None:
    record = consume()
    said = cli("replay", record, "--epoch", "0", "--batch", "1", "--pdb", code=0, stdin="p i\n" + "c\n" * 4)
    assert "recorded_run.py" in said
    assert "(Pdb) 4" in said
    assert "it is what was consumed" in said


def test_a_debugger_that_is_quit_gives_no_verdict(consume) -> None:
    said = cli("replay", consume(), "--epoch", "0", "--batch", "1", "--pdb", code=2, stdin="q\n")
    assert "the debugger ended before the batch was complete, so it was not compared" in said
    assert "it is not what was consumed" not in said


@pytest.mark.thorough
def test_altered_or_missing_record_is_refused_with_a_remedy(consume, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "contains no record: give the folder" in cli("verify", tmp_path / "empty", code=2)
    record = shutil.copytree(consume(*HERE), tmp_path / "record")
    (rows,) = record.glob("rank-0/*.rows")
    data = rows.read_bytes()
    rows.write_bytes(data[: 48 * 3] + data[48 * 4 :])
    assert "is incomplete: the rows before loader 0, epoch 0, batch 3 are missing" in cli(
        "verify", record, code=2
    )
    rows.write_bytes(data)
    told = "no batch of epoch 7 (epochs are counted from 0; recorded: "
    assert told in cli("verify", record, record, "--epoch", "7", code=2)
    assert told in cli("verify", record, "--epoch", "7", code=2)
    said = cli("replay", record, "--epoch", "0", "--batch", "70", code=2)
    assert "loader 0 of rank 0 has no epoch 0, batch 70: its last is epoch 1, batch 5" in said
    assert "has no rank 3, only 0" in cli(
        "replay", record, "--rank", "3", "--epoch", "0", "--batch", "0", code=2
    )


@pytest.mark.thorough
@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda record: next(record.glob("rank-0/*.tickets")).unlink(), id="no-tickets"),
        pytest.param(lambda record: next(record.glob("rank-0/*.bundles")).write_text("{}\n"), id="no-bundle"),
        pytest.param(lambda record: next(record.glob("rank-0/*.rows")).write_bytes(b""), id="no-rows"),
        pytest.param(lambda record: shutil.rmtree(record / "blobs"), id="no-blobs"),
    ],
)
def test_unreadable_record_is_an_error_and_not_a_difference(
    consume, tmp_path: Path, spoil: Callable[[Path], None]
) -> None:
    record = shutil.copytree(consume(*HERE), tmp_path / "record")
    spoil(record)
    said = cli("verify", record, code=2)
    assert said.splitlines()[-1].startswith("dataloaderjob: "), said
    cli("replay", record, "--epoch", "0", "--batch", "0", code=2)


def test_ranks_have_separate_folders_and_are_compared_one_by_one(consume, tmp_path: Path) -> None:
    plain, other = consume(*HERE), consume("--swap", "3", *HERE)
    one, two = shutil.copytree(plain, tmp_path / "one"), shutil.copytree(plain, tmp_path / "two")
    shutil.copytree(plain / "rank-0", one / "rank-1")
    assert "has 0, 1 and " in cli("verify", one, two, code=2)
    shutil.copytree(other / "rank-0", two / "rank-1")
    assert cli("verify", one, two, code=1).startswith("rank 1, loader 0, epoch 1, batch 0: the keys differ")


def test_unwritable_folder_ends_the_record_but_not_the_training(tmp_path: Path, rig: Rig) -> None:
    (tmp_path / "file").touch()
    done = start(str(SCRIPT), folder=tmp_path / "file")
    assert done.returncode == 0, done.stderr
    assert "cannot record to" in done.stderr
