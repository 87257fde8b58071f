"""What a state waits for: packets are read where the receiver has counted them, and the socket is left alone else."""

from __future__ import annotations

import os
import select
import socket
import threading

import pytest

from dataloaderjob.core import frames, ipc
from dataloaderjob.core.control import Control
from dataloaderjob.trainer.epochs.plans import Places
from dataloaderjob.trainer.session.attach import Opened
from dataloaderjob.trainer.session.client import Client
from dataloaderjob.trainer.session.stream import Stream


class Receiver:
    """The other end of a client's socket and control memory."""

    def __init__(self) -> None:
        self.fd = Control.create()
        self.control = Control(self.fd)
        self.sock, self.trainers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def tell(self, made: int, *, counts: bool = True) -> None:
        for packet in ipc.pack(ipc.Type.SNAPSHOT, frames.pack_snapshot(0, made, b"state"), stream=1):
            self.sock.send(packet)
            if counts:
                self.control.told()

    def close(self) -> None:
        self.sock.close()
        self.trainers.close()
        os.close(self.fd)


@pytest.fixture
def receiver():
    made = Receiver()
    yield made
    made.close()


@pytest.fixture
def client(receiver):
    made = Client.__new__(Client)  # without a sidecar
    made.control, made.lock = Control(receiver.fd), threading.RLock()
    made._heard, made._receives, made._sleepers = 0, False, 0
    made._incoming, made._opened = ipc.Assembler(), Opened()
    made._opened.sock = receiver.trainers
    places = Places(1)
    for _ in range(8):
        places.next(8)
    made.streams = {1: Stream(1, "", 8, places=places)}
    return made


def is_readable(sock: socket.socket) -> bool:
    return bool(select.select([sock], [], [], 0)[0])


def heard(client: Client) -> int:
    """Batches that the newest snapshot is behind."""
    return client.streams[1].places.beginning(0, 100)[0]


def test_snapshot_is_heard_and_no_packet_remains(client, receiver):
    receiver.tell(3)
    receiver.tell(6)
    client.hear()
    assert heard(client) == 6
    assert not is_readable(receiver.trainers)


def test_socket_is_not_read_unless_a_message_was_counted(client, receiver):
    receiver.tell(3)
    client.hear()
    receiver.tell(6, counts=False)
    client.hear()
    assert heard(client) == 3
    assert is_readable(receiver.trainers)


def test_receiver_that_replaces_a_dead_one_is_heard(client, receiver):
    receiver.tell(3)
    client.hear()
    receiver.sock.close()
    receiver.trainers.close()
    receiver.sock, receiver.trainers = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client._opened.sock, receiver.control = receiver.trainers, Control(receiver.fd)
    receiver.tell(6)
    client.hear()
    assert heard(client) == 6
