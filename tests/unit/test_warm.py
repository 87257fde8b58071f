"""What a program finds in a process forked from one that has imported torch: what a fresh interpreter would give it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm

SHOW = """\
import json, os, sys
if __name__ == "__main__":
    shown = [sys.argv[1:], sys.path[0], os.getcwd(), sorted(os.environ), "torch" in sys.modules, __name__]
    print(json.dumps(shown))
    sys.stdout.flush()
    print(json.dumps([sys.stdin.read(), sorted(os.listdir("/proc/self/fd"))]))
"""


def fresh(arguments: list[str], **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], text=True, capture_output=True, check=False, **options
    )


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["show.py", "a", "b"], id="script"),
        pytest.param(["-m", "show", "a"], id="module"),
        pytest.param(["-c", SHOW, "a"], id="text"),
    ],
)
def test_program_has_an_interpreters_environment_plus_torch(tmp_path: Path, arguments: list[str]):
    (tmp_path / "show.py").write_text(SHOW)
    options = {"cwd": tmp_path, "env": {"HOME": "/", "LC_CTYPE": "C.UTF-8"}}
    found, expected = warm.run(arguments, stdin="said", **options), fresh(arguments, input="said", **options)
    assert (found.stderr, found.returncode) == ("", 0)
    first, second = (json.loads(line) for line in found.stdout.splitlines())
    first_there, second_there = (json.loads(line) for line in expected.stdout.splitlines())
    assert first[4]
    assert not first_there[4]
    first[4] = first_there[4]
    assert first == first_there
    assert second == second_there, "no descriptor of the server is open there"


@pytest.mark.parametrize("text", ["import sys; sys.exit(7)", "1 / 0", "import os; os._exit(3)"])
def test_a_program_ends_as_it_would_in_an_interpreter(text: str):
    assert warm.run(["-c", text]).returncode == fresh(["-c", text]).returncode


def test_uncaught_error_of_a_program_is_shown_as_by_an_interpreter():
    last = warm.run(["-c", "raise ValueError('of the script')"]).stderr.splitlines()[-1]
    assert last == "ValueError: of the script"


def test_program_can_be_polled_and_killed():
    with warm.WarmProcess(
        ["-c", "print(input() * 2, flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.poll() is None
        process.stdin.write("ab\n")
        process.stdin.flush()
        assert process.stdout.readline() == "abab\n"
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.01)
        process.kill()
        assert process.wait(10) == -signal.SIGKILL
        assert process.poll() == -signal.SIGKILL


def test_two_programs_draw_different_numbers():
    text = (
        "import random, numpy, torch; print([random.random()], [numpy.random.rand()], torch.rand(1).tolist())"
    )
    first, second = (warm.run(["-c", text]).stdout.split() for _ in range(2))
    assert [a == b for a, b in zip(first, second, strict=True)] == [False, False, False]
