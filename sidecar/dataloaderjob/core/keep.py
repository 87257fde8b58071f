"""The environment variable DATALOADERJOB_KEEP. This module imports only modules that its callers need anyway."""

from __future__ import annotations

import os

from dataloaderjob.core.places import KEEP_VARIABLE

MAX_KEEP_S = 7 * 24 * 3600.0


def keep_seconds() -> float:
    """Returns the seconds for which a private service outlives its script, 0 by default. Raises InputError if the
    variable is invalid."""
    text = os.environ.get(KEEP_VARIABLE, "")
    try:
        found = float(text or 0)
    except ValueError:
        found = -1.0
    if 0 <= found <= MAX_KEEP_S:
        return found
    from dataloaderjob.core.errors import InputError

    raise InputError(
        f"{KEEP_VARIABLE} must be the number of seconds for which feeders keep running after their script, at "
        f"most {MAX_KEEP_S:.0f}, but is {text!r}: correct or unset it"
    )
