"""All targets, by name."""

from __future__ import annotations

from fuzz import files, messages, plain, shared_memory, wire
from fuzz.target import Target

TARGETS: dict[str, Target] = {
    target.name: target for group in (wire, plain, messages, shared_memory, files) for target in group.TARGETS
}
