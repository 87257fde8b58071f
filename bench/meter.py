"""CPU and time of a stretch of code, less the bench's own checks.

CPU is that of the whole process, so threads that a loader runs behind the caller's back count. A pause
takes out the wall time and the CPU of the pausing thread only: other threads go on being counted.
"""

from __future__ import annotations

import time


class Meter:
    """`start`, then `pause`/`resume` round the checks, then `stop`."""

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
        """Returns: CPU and wall seconds between start and stop, pauses left out."""
        cpu = time.process_time_ns() - self._cpu - self._out_cpu
        wall = time.perf_counter_ns() - self._wall - self._out_wall
        return cpu / 1e9, wall / 1e9

    @property
    def wall_s(self) -> float:
        """Wall seconds so far, pauses left out."""
        return (time.perf_counter_ns() - self._wall - self._out_wall) / 1e9
