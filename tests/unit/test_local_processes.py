"""Lines of children, the loop, and the end of all that carries a run's tag. Real, small processes."""

from __future__ import annotations

import functools
import itertools
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rig import until

from dataloaderjob.core import folders
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.places import RUN_VARIABLE
from dataloaderjob.core.processes import MAX_LINE_CHARS, SEE_OUTPUT, Lines, last_word
from dataloaderjob.local import reaper
from dataloaderjob.local.children import Child, Command, Loop, check_words, exit_code
from dataloaderjob.local.service import Echo


def lines_of(*pieces: bytes) -> list[str]:
    taken: list[str] = []
    lines = Lines(taken.append)
    for piece in pieces:
        lines.feed(piece)
    lines.feed(b"", final=True)
    return taken


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        (b"a\nb\n", ["a", "b"]),
        (b"a\n\nb", ["a", "", "b"]),
        (b"10%\r20%\r", ["10%", "20%"]),
        (b"a\r\nb\r\n", ["a", "b"]),
        ("gr\u00fcn\n".encode(), ["gr\u00fcn"]),
        (b"\xff\n", ["\ufffd"]),
    ],
)
def test_lines_do_not_depend_on_how_their_bytes_are_split(data: bytes, lines: list[str]):
    assert lines_of(data) == lines
    assert lines_of(*(data[i : i + 1] for i in range(len(data)))) == lines


@given(st.binary(max_size=200), st.lists(st.integers(0, 200)))
def test_any_split_of_any_bytes_gives_the_same_lines(data: bytes, cuts: list[int]):
    edges = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    pieces = [data[a:b] for a, b in itertools.pairwise(edges)]
    assert lines_of(*pieces) == lines_of(data)


def test_unterminated_line_is_shown_in_pieces():
    assert [len(line) for line in lines_of(b"x" * (MAX_LINE_CHARS + 5))] == [MAX_LINE_CHARS, 5]


POINTER = f"ERROR the process that imports torch ended: {SEE_OUTPUT}"


@pytest.mark.parametrize(
    ("said", "last"),
    [
        (["INFO begins", "ImportError: libcudart", POINTER], "ImportError: libcudart"),
        (["INFO begins", POINTER, "ImportError: libcudart"], "ImportError: libcudart"),
        (["  ImportError: libcudart ", "", " "], "ImportError: libcudart"),
        ([POINTER, ""], POINTER),
        ([], ""),
    ],
)
def test_last_words_of_a_process_skip_pointers_to_another_log(said: list[str], last: str):
    assert functools.reduce(last_word, said, "") == last


def test_exit_codes_match_a_shells():
    assert [exit_code(code) for code in (0, 3, -9, -15)] == [0, 3, 137, 143]


def child(loop: Loop, code: str, said: list, ended: list, env: dict[str, str] | None = None) -> Child:
    command = Command(
        name="c", args=[sys.executable, "-c", code], env={**os.environ, **(env or {})}, cwd=Path("/")
    )
    return Child(
        command,
        loop,
        on_line=lambda line, err: said.append((line, err)),
        on_end=lambda c: ended.append(c.code),
    )


def test_output_of_a_child_precedes_its_end():
    loop, said, ended = Loop(), [], []
    child(loop, "import sys; print('a'); sys.stderr.write('b'); sys.exit(3)", said, ended)
    loop.run(until=lambda: bool(ended))
    assert sorted(said) == [("a", False), ("b", True)]
    assert ended == [3]


def test_childs_end_does_not_wait_for_a_process_holding_its_output():
    loop, said, ended = Loop(), [], []
    code = "import subprocess, sys; subprocess.Popen(['sleep', '60']); print('a', flush=True)"
    started = child(loop, code, said, ended)
    loop.run(until=lambda: bool(ended))
    assert said == [("a", False)]
    os.killpg(started.pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("args", "env", "where"),
    [
        pytest.param(["a", "b\0c"], {}, "argument 1 of trainer-0", id="argument"),
        pytest.param(["a"], {"X": "\0"}, "environment variable 'X' of trainer-0", id="value"),
        pytest.param(["a"], {"X\0": "1"}, "of trainer-0", id="name"),
    ],
)
def test_nul_in_a_command_is_refused_by_name(args, env, where):
    with pytest.raises(InputError, match="the character NUL") as refused:
        check_words("trainer-0", args, env)
    assert where in str(refused.value)


def test_signals_are_handled_one_by_one_in_the_loop():
    loop, got = Loop(), []
    old = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2)}
    try:
        loop.signals((signal.SIGUSR1, signal.SIGUSR2), got.append)
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
        loop.run(until=lambda: len(got) == 2)
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in old.items():
            signal.signal(number, handler)
    assert got == [signal.SIGUSR1, signal.SIGUSR2]


STUBBORN = (
    "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid() if os.fork() == 0 else 0; "
    "os.write(1, b'%d\\n' % os.getpid()); time.sleep(60)"
)


def test_sweep_ends_exactly_the_processes_with_the_tag():
    env = {**os.environ, RUN_VARIABLE: "test-sweep"}
    process = subprocess.Popen([sys.executable, "-c", STUBBORN], env=env, stdout=subprocess.PIPE)
    other = subprocess.Popen(["sleep", "60"], env={**os.environ, RUN_VARIABLE: "test-sweep-2"})
    try:
        assert process.stdout is not None
        pids = {int(process.stdout.readline()), int(process.stdout.readline())}
        assert set(reaper.tagged("test-sweep")) == pids, "a daemon in a session of its own, too"
        assert reaper.sweep("test-sweep", grace_s=0.1) == 2
        assert reaper.tagged("test-sweep") == []
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        process.wait()
        process.stdout.close()


def test_reaper_ends_the_run_of_a_killed_process(tmp_path: Path):
    home = tmp_path / "home"
    folders.make(home, "")
    folders.mark(home)
    code = (
        "import os, subprocess, sys, time; from pathlib import Path; from dataloaderjob.local import reaper\n"
        "env = {**os.environ, reaper.places.RUN_VARIABLE: 'test-guard'}\n"
        "reaper.start('test-guard', Path(sys.argv[1]), env); subprocess.Popen(['sleep', '60'], env=env)\n"
        "print('up', flush=True); time.sleep(60)"
    )
    runner = subprocess.Popen([sys.executable, "-c", code, str(home)], stdout=subprocess.PIPE)
    assert runner.stdout is not None
    assert runner.stdout.readline() == b"up\n"
    until(
        lambda: len(reaper.tagged("test-guard")) == 2,
        15,
        "both have their environment, a moment after exec",
    )
    runner.kill()
    runner.wait()
    runner.stdout.close()
    until(lambda: not reaper.tagged("test-guard"), 15, "everything has ended")
    assert not home.exists()
    assert reaper.GRACE_S < 5


def test_echo_without_a_reader_does_not_block():
    read, write = os.pipe()
    os.set_blocking(read, False)
    echo = Echo(os.dup(write))
    for _ in range(100):
        echo.line("x" * 10_000)
    heard = os.read(read, 1 << 20)
    assert {len(line) for line in heard.splitlines()} == {select.PIPE_BUF - 1}
    assert 1 < len(heard.splitlines()) < 100
    os.close(read)
    os.close(write)
    echo.line("to nobody")
    echo.line("and again")
    Echo(None).line("nowhere")


FORKS = """
import os, sys
from pathlib import Path
from dataloaderjob.local.forks import PYTHON, fork
folder = sys.argv[1]
for words in (["ends"], ["ends", "3"], ["raises"], ["shows"]):
    _, out, err = made = fork("test", [*PYTHON, *words], {"PYTHONPATH": folder, "A": "b"}, folder)
    text = open(out).read() + open(err).read()
    print(words, os.waitstatus_to_exitcode(os.waitpid(made[0], 0)[1]), text.strip().splitlines()[-1:])
"""


def test_forked_part_behaves_like_its_own_interpreter(tmp_path: Path):
    for name, text in {
        "ends": "import sys; sys.exit(int(sys.argv[1]) if sys.argv[1:] else None)",
        "raises": "raise ValueError('no')",
        "shows": "import os, sys; comm = open('/proc/self/comm').read().strip()\n"
        "fds = [fd for fd in os.listdir('/proc/self/fd') if int(fd) > 2 and os.path.exists(f'/proc/self/fd/{fd}')]\n"
        "print(sys.path[0], dict(os.environ), os.getcwd(), os.getsid(0) == os.getpid(), __name__, comm, fds)",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", FORKS, str(tmp_path)], stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=30, check=True,
    )  # fmt: skip
    environment = {"PYTHONPATH": str(tmp_path), "A": "b"}
    assert done.stdout.splitlines() == [
        "['ends'] 0 []",
        "['ends', '3'] 3 []",
        "['raises'] 1 ['ValueError: no']",
        f"['shows'] 0 {[f'{tmp_path} {environment} {tmp_path} True __main__ dlj-test []']}",
    ]
