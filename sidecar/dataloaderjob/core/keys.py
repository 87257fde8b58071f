"""Keys by role: each process of a job holds only the keys for its own part of the job, and cannot impersonate another
part.

| holder | key | permitted actions |
|---|---|---|
| operator, head, commands on one machine | the job's key, from which the next three are derived | everything |
| the same | `control` | to ask the supervisor for its status, to scale, to stop |
| sidecars | `sidecar` | to report metrics and failures to the supervisor, to replace feeders, to upload blobs |
| feeders | `feeder` | to report to the supervisor, to request blobs by digest from it and from other feeders |
| a feeder's process, and all sidecars | that process's link key | to exchange tickets and batches |

A feeder generates a random link key when it starts, and sends it to the supervisor, `wrap`ped with the feeders' key.
The supervisor includes it in the list of feeders that sidecars receive, wrapped with the sidecars' key. Therefore, code
in a feeder cannot pose as a sidecar, not even to another feeder. A derived key reveals nothing about the job's key or
its siblings (HMAC-SHA256).

Before version SINCE of the control protocol, a job had one key for all roles. A pod of an earlier release therefore
holds the job's key, and proves it in a handshake of an earlier version. A feeder's pod of the current release does not
hold the job's key.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping
from enum import StrEnum

from dataloaderjob.core.errors import AuthError

SINCE = 4
"""First version of the control protocol in which each role has its own key."""
NBYTES = 32
_TAG_NBYTES = 16
KeyOf = Callable[[str, int], bytes]
"""Returns the key for a role and a version of the protocol. Raises AuthError if there is none."""


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
    "feeder": Holder.FEEDER,
    "blob": Holder.FEEDER,
}
"""The holder that may assume each role at the supervisor."""


def derive(job_key: bytes, holder: Holder) -> bytes:
    """Derives a holder's key from the job's key."""
    return hmac.digest(job_key, f"dataloaderjob {holder}".encode(), "sha256")


def of_job(job_key: bytes) -> KeyOf:
    """Returns the function that finds keys for the supervisor and its controllers, which hold the job's key."""
    made = {role: derive(job_key, holder) for role, holder in HOLDERS.items()}

    def find(role: str, protocol: int) -> bytes:
        return job_key if protocol < SINCE else _of_role(made, role)

    return find


def of_roles(made: Mapping[str, bytes]) -> KeyOf:
    """Returns the function that finds keys for a process to which peers of these roles connect."""
    return lambda role, _: _of_role(made, role)


def _of_role(made: Mapping[str, bytes], role: str) -> bytes:
    if role not in made:
        raise AuthError(f"role {role!r} is not served here, only {', '.join(made)}")
    return made[role]


def wrap(key: bytes, secret: bytes, about: str) -> str:
    """Encrypts another key for the holders of `key`, as hexadecimal text. `about` names the owner of the secret.

    The nonce is synthetic: the same arguments give the same text, and the text reveals nothing beyond this equality.
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
