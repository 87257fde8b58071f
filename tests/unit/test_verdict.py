"""The advice as text, JSON and manifest."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import yaml

from dataloaderjob.advise import verdict
from dataloaderjob.advise.command import cpus_here
from dataloaderjob.api.job import DataLoaderJob

COMMAND = ["python", "train.py", "--lr", "0.1"]


def result(**changed: Any) -> dict[str, Any]:
    """What a rank found that waits for three quarters of each step."""
    made = {
        "fetch_cpu_s": 0.3, "collate_cpu_s": 0.09, "encode_cpu_s": 0.01, "idle_s": 0.0,
        "nbytes": 38_500_000, "spread": 0.1, "refused": "",
    }  # fmt: skip
    return {
        "rank": 0, "world": 1, "local_world": 1, "steps": 50, "replayed": 20,
        "period_s": 0.4, "step_s": 0.1, "busy_cpus": 1.0,
        "dataset": "Photos", "batch_size": 64, "workers": 1, "has_feeders": False, "slots": None, "made": made,
        "cannot_ship": "", "shipped_nbytes": 1000, **changed,
    }  # fmt: skip


def advice(*results: dict[str, Any], cpus: int = 2) -> verdict.Verdict:
    return verdict.verdict(COMMAND, results or (result(),), cpus=cpus)


def test_the_first_lines_are_the_verdict_and_the_possible_gain() -> None:
    lines = verdict.lines(advice())
    assert lines[0] == "train.py waits for input for 75% of each step."
    assert (
        lines[1] == "At most a 4-fold speedup is possible: a step takes 400 ms, and 100 ms without waiting."
    )
    assert len(lines) <= 20


def test_nothing_to_gain_is_said_first_and_proposes_no_feeders() -> None:
    found = advice(result(period_s=0.101))
    assert verdict.lines(found)[0] == "Nothing to gain: train.py waits for input for 1% of each step."
    assert "manifest" not in "\n".join(verdict.lines(found))
    assert verdict.as_json(found)["feeders"] == 0


def test_json_has_the_four_figures_that_programs_read() -> None:
    found = verdict.as_json(advice())
    assert {name: found[name] for name in ("input_bound", "gain", "feeders", "limit")} == {
        "input_bound": 0.75, "gain": 4.0, "feeders": 5, "limit": "cpu",
    }  # fmt: skip


def test_free_cpus_of_this_machine_are_proposed_before_feeders_elsewhere() -> None:
    assert verdict.workers_that_suffice(advice(cpus=16)) == 5
    assert "num_workers=5 may suffice without feeders" in "\n".join(verdict.lines(advice(cpus=16)))
    assert verdict.workers_that_suffice(advice(cpus=2)) is None
    assert "feeders must run elsewhere" in "\n".join(verdict.lines(advice(cpus=2)))


def test_more_workers_are_proposed_before_feeders_and_present_ones_are_not() -> None:
    more, same = ("\n".join(verdict.lines(advice(result(workers=n), cpus=16))) for n in (1, 8))
    assert "Try num_workers=5 first. To use other CPUs, replace" in more
    assert "the 8 workers should suffice, if they get them" in same
    assert "num_workers=5" not in same


def test_busy_machine_makes_the_advice_doubtful() -> None:
    doubtful = replace(advice(), others_cpus=1.26)
    assert "doubtful    other programs kept 1.3 of this machine's CPUs busy" in "\n".join(
        verdict.lines(doubtful)
    )
    assert verdict.as_json(doubtful)["others_cpus"] == 1.26
    assert "doubtful" not in "\n".join(verdict.lines(advice()))
    assert verdict.as_json(advice())["others_cpus"] is None


def test_ranks_of_other_nodes_count_as_those_of_this_one() -> None:
    found = advice(result(world=16, local_world=2), {**result(rank=1, world=16), "period_s": 0.5})
    assert found.pipeline.ranks == 16
    assert found.pipeline.period_s == 0.5
    assert found.advice.feeders > 16 * 4


def test_script_with_our_loader_is_not_told_to_replace_its_loader() -> None:
    (torchs,), (ours,) = (
        [line for line in verdict.lines(advice(result(has_feeders=known))) if "manifest" in line]
        for known in (False, True)
    )
    assert torchs.startswith(
        "To use other CPUs, replace torch.utils.data.DataLoader with dataloaderjob.DataLoader"
    )
    assert ours.startswith("The script already uses dataloaderjob.DataLoader")


def test_what_feeders_cannot_get_is_named_with_its_remedy() -> None:
    text = "\n".join(
        verdict.lines(advice(result(cannot_ship="dataset.lock cannot be copied: make it later")))
    )
    assert "to change   dataset.lock cannot be copied: make it later" in text


@pytest.mark.parametrize("command", [COMMAND, ["python", 'a "b".py', "\\"]])
def test_the_manifest_is_one_that_the_models_accept(command: list[str]) -> None:
    found = yaml.safe_load(
        verdict.manifest(advice(result(world=4, local_world=2), result(rank=1, world=4)), command)
    )
    job = DataLoaderJob.model_validate(found)
    assert job.spec.feeders.replicas == found["spec"]["feeders"]["replicas"] > 16
    (container,) = found["spec"]["trainers"]["job"]["template"]["spec"]["containers"]
    assert container["command"] == command


def test_a_quota_of_cpus_counts_as_the_machine(tmp_path: Any) -> None:
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("100000 100000\n")
    assert cpus_here(tmp_path) == 1
    (tmp_path / "sys/fs/cgroup/cpu.max").write_text("max 100000\n")
    assert cpus_here(tmp_path) >= 1
