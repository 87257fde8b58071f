"""CPU and wall time of a stretch of code, without the bench's own checks.

CPU covers the whole process, so hidden threads of a loader count. A pause excludes only the wall time and the CPU of
the pausing thread. Other threads still count.
"""

from __future__ import annotations

import time


class Meter:
    """Measures from `start` to `stop`. Call `pause` before each check and `resume` after it."""

    def start(self) -> None:
        self._out_cpu = self._out_wall = 0
        self._wall = time.perf_counter_ns()
        self._cpu = time.process_time_ns()

    def pause(self) -> None:
        self._paused_cpu = time.thread_time_ns()
        self._paused_wall = time.perf_counter_ns()

    def resume(self) -> None:
        self._out_wall += time.perf_counter_ns() - self._paused_wall
        self._out_cpu += time.thread_time_ns() - self._paused_cpu

    def stop(self) -> tuple[float, float]:
        """Returns CPU and wall seconds between start and stop, without pauses."""
        cpu = time.process_time_ns() - self._cpu - self._out_cpu
        wall = time.perf_counter_ns() - self._wall - self._out_wall
        return cpu / 1e9, wall / 1e9

    @property
    def wall_s(self) -> float:
        """Wall seconds so far, without pauses."""
        return (time.perf_counter_ns() - self._wall - self._out_wall) / 1e9
