"""This process's clients, one for each sidecar. A forked child drops its parent's clients."""

from __future__ import annotations

import os
import threading
import weakref

from dataloaderjob.trainer.session import forks
from dataloaderjob.trainer.session.client import Client

_clients: weakref.WeakValueDictionary[str, Client] = weakref.WeakValueDictionary()
_kept: dict[str, Client] = {}
"""Clients that are kept although no loader uses them, because attaching and loading the dataset again takes 40 ms."""
_clients_lock = threading.Lock()


def connect(path: str, rank: str, *, keep: bool = False) -> Client:
    """Returns this process's client for the sidecar at `path`, which all loaders share. With `keep`, the client stays
    until the process exits."""
    with _clients_lock:
        client = _clients.get(path)
        if client is None or client.dead is not None:
            client = Client(path, rank)
            _clients[path] = client
        if keep:
            _kept.clear()
            _kept[path] = client
        return client


def _before_fork() -> None:
    tails = [client.tail for client in list(_clients.values())]
    forks.before(tail for tail in tails if tail is not None)


def _after_fork_in_child() -> None:
    global _clients_lock
    _clients_lock = threading.Lock()
    for client in list(_clients.values()):
        client.cut_off()
    _clients.clear()
    _kept.clear()
    forks.after_in_child()


os.register_at_fork(
    before=_before_fork, after_in_parent=forks.after_in_parent, after_in_child=_after_fork_in_child
)
