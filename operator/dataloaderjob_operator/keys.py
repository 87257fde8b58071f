"""Secrets of a job, derived: one that was deleted comes back with the same bytes, and nobody needs to list any.

HMAC-SHA256 with the operator's root key over a label and the job's uid. Who has a job's key learns nothing of the
root key or of another job's.
"""

from __future__ import annotations

import hashlib
import hmac

ROOT_NBYTES = 32


def job_key(root: bytes, uid: str) -> bytes:
    """Key of the links between sidecars, feeders and supervisor, 32 bytes. Raises ValueError for a short root."""
    return _derive(root, "links", uid)


def ray_token(root: bytes, uid: str) -> str:
    """Token of the job's Ray cluster, 64 hexadecimal digits. Raises ValueError for a short root."""
    return _derive(root, "ray", uid).hex()


def _derive(root: bytes, label: str, uid: str) -> bytes:
    if len(root) < ROOT_NBYTES:
        raise ValueError(f"the root key needs {ROOT_NBYTES} bytes at least, found {len(root)}")
    if not uid:
        raise ValueError("a job without a uid has no key: it is not on a cluster")
    key = hashlib.sha256(root).digest()  # HMAC itself pads with zeros: roots that end in some would be alike
    return hmac.new(key, f"dataloaderjob/{label}/{uid}".encode(), "sha256").digest()
