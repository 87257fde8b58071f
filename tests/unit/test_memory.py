"""Memory limits and the kernel's kills for want of memory, as the files of cgroups tell them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dataloaderjob.core.memory import (
    FEEDERS_FIELD,
    RECENT_S,
    MemoryWatch,
    describe_limit,
    die_as,
    die_first,
    kills,
    memory_limit,
)
from dataloaderjob.feeder.ends import Ends

MB = 1 << 20
V1 = "11:cpu:/\n4:memory:{path}\n0::/\n"
V2 = "0::{path}\n"
V1_KILLS = "oom_kill_disable 0\nunder_oom 0\noom_kill {count}\n"
V2_KILLS = "low 0\nhigh 0\nmax 7\noom 9\noom_kill {count}\noom_group_kill 0\n"


def machine(root: Path, files: dict[str, str]) -> Path:
    """A root folder with 4 GiB of memory and these files."""
    for path, text in {"proc/meminfo": "MemTotal: 4194304 kB\nMemFree: 1 kB\n", **files}.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "limit", "count"),
    [
        pytest.param({"proc/vmstat": "nr_free_pages 3\noom_kill 5\n"}, 4096 * MB, 5, id="no-cgroup"),
        pytest.param(
            {
                "proc/self/cgroup": V2.format(path="/"), "sys/fs/cgroup/memory.max": f"{420 * MB}\n",
                "sys/fs/cgroup/memory.events": V2_KILLS.format(count=3), "proc/vmstat": "oom_kill 50\n",
            },
            420 * MB, 3, id="container-v2",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1.format(path="/kubepods/pod1/abc"),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{420 * MB}\n",
                "sys/fs/cgroup/memory/memory.oom_control": V1_KILLS.format(count=2),
            },
            420 * MB, 2, id="container-v1-mounted-as-the-root",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V2.format(path="/user.slice/run.scope"),
                "sys/fs/cgroup/user.slice/memory.max": f"{900 * MB}\n",
                "sys/fs/cgroup/user.slice/memory.events": V2_KILLS.format(count=8),
                "sys/fs/cgroup/user.slice/run.scope/memory.max": "max\n",
                "sys/fs/cgroup/user.slice/run.scope/memory.events": V2_KILLS.format(count=1),
            },
            900 * MB, 1, id="scope-within-a-limited-slice",
        ),
        pytest.param(
            {
                "proc/self/cgroup": V1.format(path="/"),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.oom_control": V1_KILLS.format(count=0),
            },
            4096 * MB, 0, id="v1-without-a-limit",
        ),
        pytest.param(
            {"proc/self/cgroup": V2.format(path="/"), "sys/fs/cgroup/cgroup.procs": "1\n"},
            4096 * MB, 0, id="root-of-v2-on-an-old-kernel",
        ),
    ],
)  # fmt: skip
def test_memory_limit_and_kills_come_from_the_own_cgroup(
    files: dict[str, str], limit: int, count: int, tmp_path: Path
):
    root = machine(tmp_path, files)
    assert (memory_limit(root), kills(root)) == (limit, count)


def test_memory_limit_is_described_with_a_remedy(tmp_path: Path):
    root = machine(tmp_path, {"sys/fs/cgroup/memory.max": f"{420 * MB}", "proc/self/cgroup": "0::/"})
    assert describe_limit(FEEDERS_FIELD, root) == (
        "its pod may use 420 MiB: raise spec.feeders.resources.limits.memory, or make batches smaller"
    )
    assert describe_limit("", root).startswith("its control group may use 420 MiB: use fewer feeders")
    (root / "sys/fs/cgroup/memory.max").write_text("max")
    assert describe_limit("", root).startswith("this machine has 4 GiB: use fewer feeders")


class Kernel:
    """Counts, and a clock."""

    def __init__(self, count: int = 0) -> None:
        self.count, self.now = count, 100.0

    def watch(self) -> MemoryWatch:
        return MemoryWatch(lambda: self.count, lambda: self.now)


def test_a_kill_is_remembered_until_the_process_can_have_ended():
    kernel = Kernel(count=7)
    watch = kernel.watch()
    assert not watch.killed, "kills before this process began are no news"
    kernel.count += 1
    assert watch.killed
    kernel.now += RECENT_S - 1
    assert watch.killed, "a process that gives gigabytes back takes seconds to end"
    kernel.now += 2
    assert not watch.killed
    for _ in range(100):
        kernel.now += 1
        kernel.count += 1
        watch.look()
    assert watch.killed
    assert len(watch._seen) <= RECENT_S + 2, "what is kept is bounded"


def test_only_the_kernels_own_signal_is_blamed_on_memory():
    kernel = Kernel()
    ends = Ends(FEEDERS_FIELD, kernel.watch())
    assert ends.of_code(-9) == ("was killed by SIGKILL", False)
    kernel.count = 1
    assert [ends.of_code(code).of_memory for code in (-9, -11, 0, 3)] == [True, False, False, False]
    assert "ran out of memory" in ends.of_code(-9).text
    assert FEEDERS_FIELD in ends.unknown("ended while doing so").text


@pytest.mark.parametrize(("own", "then"), [(0, 500), (990, 1000), (1000, 1000), (-500, 0)])
def test_user_code_process_is_killed_before_the_process_that_started_it(own: int, then: int, tmp_path: Path):
    root = machine(tmp_path, {"proc/self/oom_score_adj": f"{own}\n"})
    die_first(root)
    assert int((root / "proc/self/oom_score_adj").read_text()) == then


def test_ray_worker_is_killed_no_earlier_than_its_raylet(tmp_path: Path):
    root = machine(tmp_path, {"proc/self/oom_score_adj": "1000\n", "proc/7/oom_score_adj": "990\n"})
    die_as(7, root)
    assert int((root / "proc/self/oom_score_adj").read_text()) == 990
    die_as(8, root)
    assert int((root / "proc/self/oom_score_adj").read_text()) == 990, "one that has ended says nothing"
