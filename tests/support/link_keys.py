"""The keys of connections to a job's feeders, as a sidecar learns them."""

from __future__ import annotations

from patience import PATIENCE_S

from dataloaderjob.core import handshake, keys, sockets


def link_keys(port: int, job_key: bytes, job: str) -> dict[str, bytes]:
    """The supervisor's list: the key of each feeder by its name."""
    own = keys.derive(job_key, keys.Holder.SIDECAR)
    with sockets.dial(("127.0.0.1", port), PATIENCE_S) as sock:
        handshake.greet(sock, own, role="sidecar", name="test", job=job)
        sock.settimeout(PATIENCE_S)
        listed = sockets.recv_message(sock)["feeders"]
    return {f["name"]: keys.unwrap(own, f["link"], f["instance"]) for f in listed}
