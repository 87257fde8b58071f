"""Keys by role. Each process of a job holds only the keys for its own part, so it cannot impersonate another part.

| holder | key | permitted actions |
|---|---|---|
| operator, head, commands of one machine | the job's key, from which the next four are derived | everything |
| the same | `control` | at the supervisor: to ask for the status, to scale, to stop |
| sidecars | `sidecar` | at the supervisor: to report metrics and failures, to replace feeders, to upload blobs |
| feeders | `feeder` | at the supervisor, and among feeders: to ask for a blob by its digest |
| one feeder | the key of its name | at the supervisor: to report itself and its problems |
| a feeder's process, and all sidecars | that process's link key | between these: to send tickets, to send batches |

The supervisor gives every feeder a key derived from that feeder's name, so code in one feeder cannot report on behalf
of another. A feeder generates a random link key when it starts. It sends this key to the supervisor, `wrap`ped with the
key of its name. The supervisor lists it for sidecars, wrapped with their key. So code in a feeder cannot impersonate a
sidecar, not even to another feeder. A derived key reveals nothing about the job's key or its siblings (HMAC-SHA256).

Before version SINCE of the control protocol, a job had one key for all roles. Pods of such a release hold the job's
key, and authenticate with it in the older version. Today's feeder pods do not hold it. Before version NAMED, feeders
reported with a key that all feeders shared. The supervisor no longer accepts this.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from enum import StrEnum

from dataloaderjob.core.errors import AuthError

SINCE = 4
"""First version of the control protocol in which each role has its own key."""
NBYTES = 32
NAMED = 6
"""Version of the control protocol from which each feeder's name has a key of its own."""
_TAG_NBYTES = 16
KeyOf = Callable[[str, int, str], bytes]
"""Returns the key for a role, a version of the protocol and the peer's name. Raises AuthError if there is none."""
Key = bytes | KeyOf
"""A key, or a function that returns the key of a role."""


class Holder(StrEnum):
    """Holders of a key that is derived from the job's key."""

    CONTROL = "control"
    SIDECAR = "sidecar"
    FEEDER = "feeder"


class Part(StrEnum):
    """Parts of a job that have their own certificates (`core.tls`)."""

    SUPERVISOR = "supervisor"
    FEEDER = "feeder"
    SIDECAR = "sidecar"
    OPERATOR = "operator"

    @property
    def host(self) -> str:
        """The DNS name in the part's certificates."""
        return f"{self.value}.dataloaderjob.internal"


PARTS_OF_PODS = (Part.SUPERVISOR, Part.FEEDER, Part.SIDECAR)
"""The parts of a job that run in its pods, or in a run on one machine."""
HOLDERS: Mapping[str, Holder] = {
    "control": Holder.CONTROL,
    "sidecar": Holder.SIDECAR,
    "upload": Holder.SIDECAR,
    "blob": Holder.FEEDER,
}
"""The holder whose key each role needs at the supervisor. FEEDER_ROLE is not listed, because each feeder's name has its
own key."""
FEEDER_ROLE = "feeder"


def derive(job_key: bytes, holder: Holder) -> bytes:
    """Derives a holder's key from the job's key."""
    return hmac.digest(job_key, f"dataloaderjob {holder}".encode(), "sha256")


def of_feeder(job_key: bytes, name: str) -> bytes:
    """Derives the key of a feeder's name from the job's key. A restarted supervisor derives the same key."""
    return hmac.digest(job_key, f"dataloaderjob {FEEDER_ROLE} {name}".encode("utf-8", "replace"), "sha256")


def key_for(key: Key, role: str, protocol: int, name: str) -> bytes:
    """Returns the key of a role. Raises AuthError if there is none."""
    return key if isinstance(key, bytes) else key(role, protocol, name)


def of_job(job_key: bytes) -> KeyOf:
    """Returns the function that finds keys for the supervisor and its controllers, which hold the job's key."""
    made = {role: derive(job_key, holder) for role, holder in HOLDERS.items()}

    def find(role: str, protocol: int, name: str) -> bytes:
        if protocol < SINCE:
            return job_key
        if role != FEEDER_ROLE:
            return _of_role(made, role, also=FEEDER_ROLE)
        if protocol < NAMED:
            raise AuthError(
                f"the feeder speaks protocol version {protocol}, but version {NAMED} or later is required, in which "
                "each feeder's name has its own key: use images from the same release for all of the job's pods"
            )
        return of_feeder(job_key, name)

    return find


def of_roles(made: Mapping[str, bytes]) -> KeyOf:
    """Returns the function that finds keys for a process that accepts only peers of these roles."""
    return lambda role, _protocol, _name: _of_role(made, role)


def _of_role(made: Mapping[str, bytes], role: str, also: str | None = None) -> bytes:
    if role not in made:
        served = [*made, *([] if also is None else [also])]
        raise AuthError(f"role {role!r} is not served here, only {', '.join(served)}")
    return made[role]


def wrap(key: bytes, secret: bytes, about: str) -> str:
    """Encrypts the key `secret` for the holders of `key`, as hexadecimal text. `about` names the owner of `secret`.

    The nonce is derived from the arguments, so equal arguments give equal texts. The text reveals nothing else.
    """
    if len(secret) != NBYTES:
        raise ValueError(f"a key must have {NBYTES} bytes, but has {len(secret)}")
    tag = _tag(key, secret, about)
    return (tag + _masked(key, tag, secret)).hex()


def unwrap(key: bytes, text: str, about: str) -> bytes:
    """Returns the key that `text` contains. Raises AuthError if it was wrapped with another key, or for another
    owner."""
    try:
        data = bytes.fromhex(text)
    except ValueError as exc:
        raise AuthError("a wrapped key must be hexadecimal text") from exc
    tag, secret = data[:_TAG_NBYTES], _masked(key, data[:_TAG_NBYTES], data[_TAG_NBYTES:])
    if len(data) != _TAG_NBYTES + NBYTES or not hmac.compare_digest(tag, _tag(key, secret, about)):
        raise AuthError(f"the link key of {about!r} was not created by a holder of this key")
    return secret


def _tag(key: bytes, secret: bytes, about: str) -> bytes:
    return hmac.digest(key, b"tag " + secret + about.encode("utf-8", "replace"), "sha256")[:_TAG_NBYTES]


def _masked(key: bytes, tag: bytes, data: bytes) -> bytes:
    pad = hmac.digest(key, b"pad " + tag, "sha256")
    return bytes(a ^ b for a, b in zip(pad, data, strict=False))
