"""Ctrl-C interrupts, as in a terminal: a shell's background job ignores it, and Python then leaves it so."""

from __future__ import annotations

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
