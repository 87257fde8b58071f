"""Numbers as text, as a report shows them."""

from __future__ import annotations

import time


def duration(seconds: float) -> str:
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1:
            value = seconds * factor
            return f"{value:.3g} {unit}" if value < 1000 else f"{value:,.0f} {unit}"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0"


def span(seconds: float) -> str:
    """Formats a duration: `1.4 s`, `85 s`, `12 min`, `3 h 05`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = int(seconds // 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02}"


def clock(seconds: float) -> str:
    """Formats the time since the start of the run: `42.5 s`, `12:05`, `3:12:05`."""
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02} min"


def size(nbytes: float) -> str:
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} bytes"


def when(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def count(number: int, what: str) -> str:
    plural = f"{what}es" if what.endswith(("ch", "ss")) else f"{what}s"
    return f"{number:,} {what if number == 1 else plural}"
