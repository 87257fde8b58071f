"""The verdict on runs of one machine: in the status, on the last line of a run, and on that of a script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sim_job import SimJob

from dataloaderjob.core import places
from dataloaderjob.local import console
from dataloaderjob.local.status import History, LiveRun, Snapshot
from dataloaderjob.local.verdicts import VerdictFile, closing_words, verdict_of
from dataloaderjob.trainer.session.closing import NOTICEABLE_S, STATED_S, last_line

RUN = LiveRun(Path("/run"), {"job": "mnist", "pid": 1, "manifest": "m", "port": 1, "socket": "s"})
RECEIVER = {"rank": "0", "trainer": 1, "receiver": 2, "next_calls": 3, "ready": 1}
COUNTED = {"wait_ns": 80, "step_ns": 20}


def status(**job: object) -> dict[str, object]:
    found = SimJob(**job).run(90)  # type: ignore[arg-type]
    assert found is not None
    return {"desired": 1, "ready": 1, "measures": json.loads(json.dumps(found.as_dict()))}


def lines(supervisor: dict[str, object]) -> list[str]:
    history = History()
    history.add(Snapshot(at=1.0, sidecar={"totals": {}, "receivers": [RECEIVER]}, supervisor=supervisor))
    return list(console.status_lines(RUN, history))


def test_the_status_says_whether_training_waits():
    assert (
        "  training waits for input for 80% of each step; the feeders' CPUs are the limit; 6 feeders instead of 1"
        in ("\n".join(lines(status())))
    )
    assert "  training hardly waits for input (0% of each step)" in lines(status(desired=6))
    assert "  too few batches so far to tell whether training waits for input" in lines(
        {"desired": 1, "ready": 1}
    )


@pytest.mark.parametrize("measures", [None, 7, [], {}, {"seconds": "x"}, {"seconds": -1.0}])
def test_a_status_without_measures_has_no_verdict(measures):
    assert verdict_of({"measures": measures}) is None


def test_the_table_notes_that_training_waits():
    history = History()
    history.add(Snapshot(at=1.0, supervisor=status()))
    assert console.table_of("mnist", history).note.startswith("training waits for input for 80%")
    calm = History()
    calm.add(Snapshot(at=1.0, supervisor=status(desired=6)))
    assert console.table_of("mnist", calm).note == ""


def test_a_run_that_waited_ends_with_what_to_do():
    verdict = verdict_of(status())
    said = closing_words(verdict, COUNTED, per_pod=2, cpus=64)
    assert said.endswith("3 replicas instead of 1 would make it 5.0 times faster: set spec.feeders.replicas")
    assert closing_words(verdict, COUNTED, per_pod=1, cpus=2).endswith(
        "but on more CPUs than this machine's 2"
    )


@pytest.mark.parametrize(
    ("job", "counters"), [({}, {"wait_ns": 1, "step_ns": 99}), ({}, {}), ({"desired": 6}, COUNTED)]
)
def test_a_run_that_hardly_waited_ends_without_a_verdict(job, counters):
    assert closing_words(verdict_of(status(**job)), counters, per_pod=1, cpus=8) == ""


def test_a_run_of_few_batches_ends_without_a_verdict():
    assert closing_words(None, COUNTED, per_pod=1, cpus=8) == ""


@pytest.mark.parametrize(("waited_s", "worked_s"), [(NOTICEABLE_S / 2, 0.0), (0.0, 0.0), (1.0, STATED_S - 2)])
def test_a_short_script_that_hardly_waited_says_nothing(waited_s, worked_s):
    assert last_line(waited_s, worked_s, ("it waits", 6, 1, 6), 8) == ""


def test_a_script_that_hardly_waited_says_how_long():
    assert (
        last_line(60.0, 1000.0, ("it waits", 6, 1, 6), 8) == "training waited for input for 60 of 1060 s (6%)"
    )
    assert last_line(4.0, 16.0, ("", 0, 0, 0), 8) == "training waited for input for 4 of 20 s (20%)"


@pytest.mark.parametrize(
    ("verdict", "cpus", "end"),
    [
        (
            ("", 0, 0, 0),
            8,
            "training waited for input for 30 of 40 s; `dataloaderjob advise -- COMMAND` finds the reason",
        ),
        (("it waits", 6, 1, 0), 2, "it waits (num_workers=6)"),
        (("it waits", 6, 1, 6), 2, "it waits, but this machine has 2 CPUs: a job on a cluster may have more"),
        (("it waits", 2, 2, 2), 2, "30 of 40 s. Lately, it waits"),
    ],
)
def test_a_script_that_waited_says_what_to_do(verdict, cpus, end):
    assert last_line(30.0, 10.0, verdict, cpus).endswith(end)


def test_the_verdict_file_is_written_when_the_verdict_changes(tmp_path: Path):
    file, path = VerdictFile(tmp_path), tmp_path / places.VERDICT_NAME
    file.write(None)
    assert not path.exists()
    file.write(verdict_of(status()))
    assert json.loads(path.read_text())["feeders"] == 6
    first = path.stat().st_ino
    file.write(verdict_of(status()))
    assert path.stat().st_ino == first
    file.write(verdict_of(status(desired=6)))
    assert json.loads(path.read_text())["now"] == 6
    file.forget()
    assert not path.exists()


def test_a_full_disk_does_not_end_the_service(tmp_path: Path):
    VerdictFile(tmp_path / "gone").write(verdict_of(status()))
