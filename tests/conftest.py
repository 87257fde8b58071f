"""Ctrl-C interrupts, as in a terminal: a shell's background job ignores it, and Python then leaves it so. An example of
hypothesis may take as long as the machine wants: speed is what benchmarks measure."""

from __future__ import annotations

import signal

from hypothesis import settings

signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
