"""CPU that the benchmarks count, of real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from bench import machine

BURN = """
import sys, threading, time

def burn():
    end = time.thread_time() + 0.3
    while time.thread_time() < end:
        pass

sys.stdin.readline()
thread = threading.Thread(target=burn)
thread.start()
thread.join()
print("burned", flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def other():
    with subprocess.Popen(
        [sys.executable, "-c", BURN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


def test_cpu_time_of_an_exited_thread_is_counted(other):
    before = machine.cpu_ns([other.pid])
    print(file=other.stdin, flush=True)
    assert other.stdout.readline() == "burned\n"
    assert machine.cpu_ns([other.pid]) - before >= 0.3e9


def test_exited_process_is_named(other):
    other.kill()
    other.wait()
    with pytest.raises(RuntimeError, match=f"process {other.pid} has ended"):
        machine.cpu_ns([other.pid])
