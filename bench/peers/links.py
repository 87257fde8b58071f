"""Peers of B15: Arrow Flight, pyzmq and ray.get, with senders at the far end of a link; and ours under TLS
or through a TLS proxy."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench.links import FAR, NEAR, Case, link, measure
from bench.peers.transport import Sender, sender, serve_flight, serve_zmq
from bench.raybox import ray_box


@contextlib.contextmanager
def _senders(serve: Callable[..., None], case: Case) -> Iterator[list[int]]:
    """Yields the ports of the senders at `FAR`."""
    with link(case.gbit) as namespace, contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(sender(serve, case.nbytes, host=FAR, namespace=namespace))
            for _ in range(case.senders)
        ]


def _own_pid() -> list[int]:
    return [os.getpid()]


def flight(case: Case) -> dict[str, Any]:
    with _senders(serve_flight, case) as ports:
        from pyarrow import flight

        clients = [flight.FlightClient(f"grpc://{FAR}:{port}") for port in ports]
        readers = [client.do_get(flight.Ticket(b"")) for client in clients]
        turn, slot = itertools.cycle(readers), np.empty(case.nbytes, np.uint8)

        def take() -> np.ndarray:
            np.copyto(slot, next(turn).read_chunk().data.column(0).to_numpy())
            return slot

        found = measure(take, case, _own_pid)
        for reader in readers:
            reader.cancel()
        return found


def pyzmq(case: Case) -> dict[str, Any]:
    with _senders(serve_zmq, case) as ports:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PULL) as sock:
            sock.setsockopt(zmq.RCVHWM, max(1, case.depth // case.senders))
            for port in ports:
                sock.connect(f"tcp://{FAR}:{port}")
            slot = np.empty(case.nbytes, np.uint8)

            def take() -> np.ndarray:
                sock.recv_into(slot.data)
                return slot

            found = measure(take, case, _own_pid)
            context.destroy(linger=0)
            return found


def ray_get(case: Case) -> dict[str, Any]:
    """Counts the driver's raylet as receiver, because objects pass through it."""
    import ray

    store_nbytes = (2 * case.depth + 6) * case.nbytes
    with (
        link(case.gbit) as namespace,
        ray_box(
            num_cpus=1, store_nbytes=store_nbytes, far_node=True, addresses=(NEAR, FAR, namespace)
        ) as pids,
    ):
        remote: Any = ray.remote
        kind = remote(num_cpus=0, resources={"far": 0.001})(Sender)
        turn = itertools.cycle([kind.remote(case.nbytes) for _ in range(case.senders)])
        asked: deque[Any] = deque(next(turn).next_body.remote() for _ in range(case.depth))
        slot = np.empty(case.nbytes, np.uint8)

        def take() -> np.ndarray:
            np.copyto(slot, ray.get(asked.popleft()))
            asked.append(next(turn).next_body.remote())
            return slot

        return measure(take, case, lambda: pids)


def under_tls(case: Case) -> dict[str, Any]:
    from bench.ours import b15_links

    return b15_links(case, tls=True)


def through_proxies(case: Case) -> dict[str, Any]:
    from bench.ours import b15_links

    return b15_links(case, proxies=True)


PEERS = {
    "ours under TLS": under_tls,
    "ours through stunnel": through_proxies,
    "Arrow Flight": flight,
    "pyzmq": pyzmq,
    "ray.get with copy, two raylets": ray_get,
}
