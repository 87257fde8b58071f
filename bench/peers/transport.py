"""Peers of B2: Arrow Flight, grpcio, pyzmq, asyncio streams, ray.get with copy.

Each sender is a process of its own. This process is only the receiver. All send the body as it lies in memory, with no
more serialisation than the library requires.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import socket
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from bench import links
from bench.raybox import ray_box
from bench.transport import Case, Steps, bodies, endless, measure

_HOST = "127.0.0.1"


@contextlib.contextmanager
def sender(
    serve: Callable[[str, int, Any], None], nbytes: int, *, host: str = _HOST, namespace: str | None = None
) -> Iterator[int]:
    """Runs `serve(host, nbytes, pipe)` in a forked process; yields the port that it reports."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()

    def main() -> None:
        if namespace is not None:
            links.enter(namespace)
        serve(host, nbytes, there)

    process = context.Process(target=main, daemon=True)
    process.start()
    there.close()
    try:
        yield here.recv()
    finally:
        process.kill()
        process.join()


def serve_flight(host: str, nbytes: int, pipe: Any) -> None:
    import pyarrow as pa
    from pyarrow import flight

    schema = pa.schema([("body", pa.uint8())])

    class Server(flight.FlightServerBase):
        def do_get(self, context: Any, ticket: Any) -> Any:
            made = [pa.record_batch([pa.array(body)], schema=schema) for body in bodies(nbytes)]

            def batches() -> Iterator[Any]:
                while True:
                    yield from made

            return flight.GeneratorStream(schema, batches())

    server = Server(f"grpc://{host}:0")
    pipe.send(server.port)
    server.serve()


def flight(case: Case) -> dict[str, Any]:
    with sender(serve_flight, case.nbytes) as port:
        from pyarrow import flight

        client = flight.FlightClient(f"grpc://{_HOST}:{port}")
        reader = client.do_get(flight.Ticket(b""))

        def receive(slot: np.ndarray) -> None:
            column = reader.read_chunk().data.column(0)
            np.copyto(slot, column.to_numpy())

        found = measure(receive, case)
        reader.cancel()
        client.close()
        return found


_GRPC_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def serve_grpc(host: str, nbytes: int, pipe: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc

    def stream(request: bytes, context: Any) -> Iterator[bytes]:
        made = [body.tobytes() for body in bodies(nbytes)]
        while True:
            yield from made

    handlers = {"Stream": grpc.unary_stream_rpc_method_handler(stream)}
    server = grpc.server(ThreadPoolExecutor(1), options=_GRPC_OPTIONS)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Feed", handlers),))
    port = server.add_insecure_port(f"{host}:0")
    server.start()
    pipe.send(port)
    server.wait_for_termination()


def grpcio(case: Case) -> dict[str, Any]:
    with sender(serve_grpc, case.nbytes) as port:
        import grpc

        with grpc.insecure_channel(f"{_HOST}:{port}", options=_GRPC_OPTIONS) as channel:
            call = channel.unary_stream("/bench.Feed/Stream")(b"")

            def receive(slot: np.ndarray) -> None:
                np.copyto(slot, np.frombuffer(next(call), np.uint8))

            found = measure(receive, case)
            call.cancel()
        return found


def serve_zmq(host: str, nbytes: int, pipe: Any) -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.PUSH) as sock:
        sock.setsockopt(zmq.SNDHWM, 4)
        pipe.send(sock.bind_to_random_port(f"tcp://{host}"))
        for body in endless(nbytes):
            sock.send(body.data, copy=False)


def pyzmq(case: Case) -> dict[str, Any]:
    with sender(serve_zmq, case.nbytes) as port:
        import zmq

        with zmq.Context() as context, context.socket(zmq.PULL) as sock:
            sock.setsockopt(zmq.RCVHWM, case.depth)
            sock.connect(f"tcp://{_HOST}:{port}")

            def receive(slot: np.ndarray) -> None:
                n = sock.recv_into(slot.data)
                if n != case.nbytes:
                    raise RuntimeError(f"a message of {case.nbytes} bytes was due, found {n}")

            found = measure(receive, case)
            context.destroy(linger=0)
            return found


def serve_tcp(host: str, nbytes: int, pipe: Any) -> None:
    with socket.create_server((host, 0)) as listener:
        pipe.send(listener.getsockname()[1])
        connection, _ = listener.accept()
        with connection:
            for body in endless(nbytes):
                connection.sendall(body.data)


def asyncio_streams(case: Case) -> dict[str, Any]:
    """Raises the reader's limit from 64 KiB to two bodies, its best setting."""
    with sender(serve_tcp, case.nbytes) as port:
        return asyncio.run(_receive_streams(port, case))


async def _receive_streams(port: int, case: Case) -> dict[str, Any]:
    reader, writer = await asyncio.open_connection(_HOST, port, limit=2 * case.nbytes)
    steps = Steps(case)
    for slot in steps:
        np.copyto(slot, np.frombuffer(await reader.readexactly(case.nbytes), np.uint8))
    writer.transport.abort()
    return steps.found


class Sender:
    """A Ray actor that returns the bodies in turn."""

    def __init__(self, nbytes: int) -> None:
        self._bodies = endless(nbytes)

    def next_body(self) -> np.ndarray:
        return next(self._bodies)


def ray_get(case: Case, *, far: bool) -> dict[str, Any]:
    """Measures `ray.get` with a copy. With `far` the sender is on a second raylet of this machine, and the driver's
    raylet counts as receiver. Otherwise sender and driver share an object store, nothing crosses the network stack,
    and only the driver's CPU counts."""
    import ray

    with ray_box(num_cpus=1, store_nbytes=(2 * case.depth + 6) * case.nbytes, far_node=far) as pids:
        options: dict[str, Any] = {"num_cpus": 1, **({"resources": {"far": 1}} if far else {})}
        remote: Any = ray.remote
        actor = remote(**options)(Sender).remote(case.nbytes)
        asked: deque[Any] = deque(actor.next_body.remote() for _ in range(case.depth))

        def receive(slot: np.ndarray) -> None:
            np.copyto(slot, ray.get(asked.popleft()))
            asked.append(actor.next_body.remote())

        return measure(receive, case, also=pids[1:] if far else [])


PEERS = {
    "Arrow Flight": flight,
    "grpcio": grpcio,
    "pyzmq": pyzmq,
    "asyncio streams": asyncio_streams,
    "ray.get with copy, two raylets": functools.partial(ray_get, far=True),
    "ray.get with copy, same store": functools.partial(ray_get, far=False),
}
