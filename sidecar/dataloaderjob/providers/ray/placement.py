"""All calls to Ray on the supervisor's behalf: connecting to Ray, and placing, killing and finding feeders. Only the
main thread calls this module.

`Explainer` derives the reason why a feeder is late from the record of its actor in Ray's GCS (pure). Ray kills and
restarts a worker process that has not registered with its raylet in time. After six such attempts, the actor is dead
(Ray 2.60). An actor whose constructor raises an exception is dead immediately.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import ray
from ray._private import state as ray_state
from ray._private import worker as ray_worker
from ray.core.generated import common_pb2, gcs_pb2

from dataloaderjob.core.errors import ServiceError, first_line
from dataloaderjob.core.memory import remedy
from dataloaderjob.core.settings import ForeignNode, SupervisorSettings, read_key
from dataloaderjob.core.sockets import parse_address
from dataloaderjob.core.supervision import (
    EXIT_RAY_LATE,
    EXIT_RAY_LOST,
    MAX_FEEDERS,
    Cause,
    index_of,
    name_of,
)
from dataloaderjob.providers.provider import Why, feeder_settings
from dataloaderjob.providers.ray import actor, external
from dataloaderjob.providers.ray.actor import Feeder

log = logging.getLogger(__name__)

GCS_GONE_S = 5.0
"""Seconds without Ray's GCS after which this process ends, because calls to Ray then hang."""
REGISTER_MARGIN_S = 1.0
"""Seconds added to the raylet's timeout, because the raylet starts its clock a moment later than this process."""
JOIN_S = 10.0
"""Seconds that a node may take to join Ray. Until then, lack of room is not reported as the cause."""
MEMORY_KILL_S = 30.0
"""Seconds for which a kill by Ray's memory monitor counts as the cause of a feeder's loss."""
MODULE_MISSING_S = 30.0
"""Seconds for which a worker's failed import counts as the cause of a restart. Ray does not name the worker's job."""
DEAD = "DEAD"
_OUT_OF_MEMORY = common_pb2.WorkerExitType.Value("NODE_OUT_OF_MEMORY")  # type: ignore[attr-defined]
_MODULE_MISSING = "No module named 'dataloaderjob"
_INSTALL = (
    "install dataloaderjob[feeder], in this job's version, for the Python of every node of the Ray cluster"
)
GIB = 1 << 30
_STARTUP_FAILED = "worker startup"
"""Text in the GCS's record of an actor whose process never registered."""


class Life(NamedTuple):
    """The GCS's record of an actor."""

    state: str
    """Ray's name for the actor's state, such as PENDING_CREATION."""
    registered: bool
    """True if a worker process has registered for the actor."""
    restarts: int = 0
    death: str = ""
    """The last line of the reason for the actor's death, or the import error that ended its last process; empty
    otherwise."""
    host: str = ""
    """Address of the node that Ray has chosen for the actor; empty until then."""


class Room(NamedTuple):
    """The room for feeders on the nodes."""

    places: int
    """Number of feeders for which the nodes have room, including those already placed."""
    lacking: str
    """Resources that are missing for one more feeder; empty if none is missing now."""


class Explainer:
    """The explainer of late feeders. It remembers since when each feeder has lacked room, or has had room but no
    process."""

    def __init__(self, register_timeout_s: float) -> None:
        self._register_timeout_s = register_timeout_s
        self._starting: dict[int, float] = {}
        self._crowded: dict[int, float] = {}
        """feeder -> time since which no node has had room for it."""

    def explain(
        self, late: Iterable[int], lives: Mapping[int, Life], room: Room, *, taken: int, now: float
    ) -> Iterator[Why]:
        """Yields the reasons why feeders are late. `late`: the feeders without a report. `taken`: number of places that
        all other feeders occupy."""
        for why in self._explain(sorted(late), lives, room, taken=taken, now=now):
            life = lives.get(why.feeder)
            yield why if life is None else why._replace(host=life.host)

    def _explain(
        self, late: list[int], lives: Mapping[int, Life], room: Room, *, taken: int, now: float
    ) -> Iterator[Why]:
        self._starting, self._crowded = (
            {index: since for index, since in known.items() if index in late}
            for known in (self._starting, self._crowded)
        )
        free = room.places - taken - sum(lives[i].registered for i in late if i in lives)
        for index in late:
            life = lives.get(index)
            if life is None:
                yield Why(index, Cause.STARTS, "Ray does not know it yet")
            elif life.state == DEAD:
                self._starting.pop(index, None)
                yield self._dead(index, life)
            elif life.restarts and _MODULE_MISSING in life.death:
                yield Why(index, Cause.FAILS, f"Ray's workers cannot import dataloaderjob: {_INSTALL}")
            elif life.restarts:
                yield Why(
                    index, Cause.FAILS,
                    "its process or its node ended before the feeder reported, and Ray starts the feeder again: the "
                    "output of its pod, or of this run, may explain why",
                )  # fmt: skip
            elif life.registered:
                yield Why(index, Cause.STARTS, "its process is running, but has not reported yet")
            elif free <= 0:
                self._starting.pop(index, None)
                joining = now - self._crowded.setdefault(index, now) < JOIN_S
                lacking = room.lacking or "other feeders use it"
                if joining:
                    yield Why(index, Cause.STARTS, f"no Ray node has room for it yet ({lacking})")
                else:
                    text = f"no node has room ({lacking}): add nodes or lower the number of feeders"
                    yield Why(index, Cause.NO_ROOM, text)
            else:
                free -= 1
                self._crowded.pop(index, None)
                since = self._starting.setdefault(index, now)
                if now - since > self._register_timeout_s + REGISTER_MARGIN_S:
                    yield Why(index, Cause.REGISTER_TIMEOUT, self._never_registered())
                else:
                    yield Why(
                        index,
                        Cause.STARTS,
                        "Ray has room for it; its process has not registered with Ray yet",
                    )

    def _dead(self, index: int, life: Life) -> Why:
        if _STARTUP_FAILED in life.death:
            return Why(index, Cause.REGISTER_TIMEOUT, self._never_registered(), dead=True)
        return Why(index, Cause.FAILS, f"its process failed at its start: {life.death}", dead=True)

    def _never_registered(self) -> str:
        return (
            f"none of its worker processes registered with Ray within worker_register_timeout, "
            f"{self._register_timeout_s:g} s; Ray ends each one and starts another: raise "
            "spec.ray.managed.tuning.workerRegisterTimeoutSeconds. If they crash at startup instead, Ray's log "
            "raylet.out on their node shows the crash"
        )


class RayProvider:
    """The provider that starts feeders as detached named actors of one Ray namespace."""

    explain_after_s = 5.0

    def __init__(self, settings: SupervisorSettings) -> None:
        self._settings = settings
        self._namespace = settings.ray_tag or f"dataloaderjob-{settings.job}"
        self._foreign: tuple[ForeignNode, ...] = ()
        if settings.ray_external:
            key = read_key(settings.feeder_key_path or settings.key_path)
            self._foreign = (ForeignNode(key=key, env=settings.feeder_env, tag=self._namespace),)
        self._remote = ray.remote(Feeder)
        self.session = ""
        """Ray's name for the cluster, once connected."""
        self.in_force: dict[str, Any] = {}
        """Ray's version and config, according to its GCS, once connected."""
        self._explainer = Explainer(settings.worker_register_timeout_s)
        self._actors: dict[int, str] = {}
        """feeder -> hexadecimal ID of its actor, for feeders that were placed or looked up."""

    def connect(self) -> None:
        """Connects to Ray. A watchdog ends this process if ray.init, which has no deadline, takes too long. Raises
        ServiceError if Ray refuses.
        """
        settings = self._settings
        with _deadline(settings.init_timeout_s, self._late_text()):
            if settings.ray_external:
                external.look(settings.ray_address)
            try:
                ray.init(
                    settings.ray_address,
                    namespace=self._namespace,
                    log_to_driver=True,
                    configure_logging=False,
                )
            except Exception as exc:
                raise ServiceError(
                    f"Ray at {settings.ray_address} refused the supervisor: {exc}. The head must be running, and the "
                    "cluster's token must be in RAY_AUTH_TOKEN_PATH, with RAY_AUTH_MODE=token"
                ) from exc
        self.session = str(ray.get_runtime_context().get_session_name())
        self.in_force = {"version": ray.__version__, **ray_state.state.get_system_config()}  # type: ignore[no-untyped-call]
        actor.show(self._namespace if settings.ray_external else "")
        args = (settings.ray_address, _raylet_pidfd())
        threading.Thread(target=_end_when_gone, args=args, name="dlj-ray", daemon=True).start()

    def _late_text(self) -> str:
        settings = self._settings
        return (
            f"ray.init to {settings.ray_address} did not return within {settings.init_timeout_s:.0f} s. "
            f"Ray restarts a worker process that takes longer than {settings.worker_register_timeout_s} s to start: "
            "raise spec.ray.managed.tuning.workerRegisterTimeoutSeconds. If the head itself does not answer, see the "
            "logs of gcs_server and raylet"
        )

    def found(self) -> list[int]:
        try:
            names = ray.util.list_named_actors(all_namespaces=False)
        except Exception as exc:
            raise ServiceError(f"Ray does not list the feeders: {first_line(exc)}") from exc
        return sorted(index for name in names if (index := index_of(name)) is not None)

    def place(self, index: int, num_feeders: int, own_key: str) -> None:
        """Asks Ray for a feeder, which reports on its own once it is up. Raises ServiceError if Ray refuses."""
        options = {
            "name": name_of(index),
            "namespace": self._namespace,
            "lifetime": "detached",
            "max_restarts": -1,
            **resource_options(self._settings.feeder_resources),
        }
        try:
            made: Any = self._remote.options(**options).remote(
                feeder_settings(self._settings, index, num_feeders, self.session, own_key),
                *self._foreign,
            )
        except Exception as exc:
            raise ServiceError(f"Ray does not place it: {first_line(exc)}") from exc
        self._actors[index] = made._actor_id.hex()  # noqa: SLF001  no public way to an actor's id from outside

    def kill(self, index: int) -> None:
        try:
            ray.kill(ray.get_actor(name_of(index), namespace=self._namespace), no_restart=True)
        except ValueError:
            log.debug("%s does not exist", name_of(index))
        except Exception as exc:
            log.warning("%s could not be killed: %s", name_of(index), first_line(exc))

    def late(self, indices: Sequence[int], *, taken: int, now: float) -> list[Why]:
        return list(
            self._explainer.explain(indices, self._lives(indices), self._room(), taken=taken, now=now)
        )

    def out_of_memory(self) -> Mapping[str, str]:
        """Finds the workers that Ray's memory monitor killed, according to the GCS. The GCS does not record such kills
        for actors."""
        return {
            str(worker.worker_address.ip_address): monitor_text(
                str(worker.exit_detail), self._settings.memory_field
            )
            for worker in self._ended_workers(MEMORY_KILL_S)
            if worker.exit_type == _OUT_OF_MEMORY
        }

    def _ended_workers(self, seconds: float) -> list[Any]:
        """Returns the GCS's records of processes that ended within the last `seconds`. Raises ServiceError."""
        try:
            table = ray_state.state._connect_and_get_accessor().get_worker_table()  # noqa: SLF001  the only way to it
        except Exception as exc:
            raise ServiceError(f"Ray does not report how its workers ended: {first_line(exc)}") from exc
        workers = map(gcs_pb2.WorkerTableData.FromString, table)  # type: ignore[attr-defined]
        since_ms = (time.time() - seconds) * 1000
        return [worker for worker in workers if not worker.is_alive and worker.end_time_ms > since_ms]

    def _room(self) -> Room:
        """Asks Ray how many feeders it has room for, and which resources it lacks for one more. Raises ServiceError."""
        needed = self._settings.feeder_resources
        try:
            nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
            free = ray.available_resources()  # type: ignore[no-untyped-call]
        except Exception as exc:
            raise ServiceError(f"Ray does not report its free resources: {first_line(exc)}") from exc
        return room(needed, nodes, free)

    def _lives(self, indices: Iterable[int]) -> dict[int, Life]:
        """Returns the GCS's records of these feeders' actors. Raises ServiceError."""
        try:
            lives = {index: life for index in indices if (life := self._life(index)) is not None}
        except Exception as exc:
            raise ServiceError(f"Ray does not report the state of its actors: {first_line(exc)}") from exc
        if self._foreign and any(life.restarts for life in lives.values()):
            ends = [str(worker.exit_detail) for worker in self._ended_workers(MODULE_MISSING_S)]
            if any(_MODULE_MISSING in end for end in ends):
                return {i: life._replace(death=life.death or _MODULE_MISSING) for i, life in lives.items()}
        return lives

    def _life(self, index: int) -> Life | None:
        if index not in self._actors:  # an earlier supervisor placed it
            try:
                found = ray.get_actor(name_of(index), namespace=self._namespace)
            except ValueError:
                return None
            self._actors[index] = found._actor_id.hex()  # noqa: SLF001  as above
        info = ray_state.state.get_actor_info(ray.ActorID(bytes.fromhex(self._actors[index])))
        if info is None:
            del self._actors[index]
            return None
        table: Any = gcs_pb2.ActorTableData  # type: ignore[attr-defined]
        actor = table.FromString(info)
        state = table.ActorState.Name(actor.state)
        death = _last_line(actor.death_cause) if state == DEAD else ""
        return Life(state, bool(actor.address.worker_id), actor.num_restarts, death, actor.address.ip_address)


def resource_options(needed: Mapping[str, float]) -> dict[str, Any]:
    """Returns the actor options that request these resources."""
    names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    custom = {name: amount for name, amount in needed.items() if name not in names}
    return {
        "num_cpus": 0,
        **{names[name]: amount for name, amount in needed.items() if name in names},
        "resources": custom,
    }


def room(
    needed: Mapping[str, float], nodes: Sequence[Mapping[str, float]], free: Mapping[str, float]
) -> Room:
    """Returns the room for feeders. Each feeder needs the resources `needed`. `nodes`: the total resources of each
    node. `free`: the free resources of all nodes together."""
    needed = {name: amount for name, amount in needed.items() if amount}
    if not needed:
        return Room(MAX_FEEDERS, "")
    places = sum(min(int(node.get(name, 0) / amount) for name, amount in needed.items()) for node in nodes)
    lacking = []
    for name, amount in needed.items():
        total = sum(node.get(name, 0) for node in nodes)
        largest = max((node.get(name, 0) for node in nodes), default=0)
        if free.get(name, 0) < amount:
            lacking.append(
                f"{name}: {_shown(name, amount)} needed, {_shown(name, free.get(name, 0))} of "
                f"{_shown(name, total)} free"
            )
        elif largest < amount:
            lacking.append(
                f"{name}: {_shown(name, amount)} needed, the largest node has {_shown(name, largest)}"
            )
    return Room(places, "; ".join(lacking))


def _shown(name: str, amount: float) -> str:
    return f"{amount / GIB:.1f} GiB" if name == "memory" else f"{amount:g}"


def monitor_text(detail: str, field: str) -> str:
    """Returns a message for users about a worker that Ray's memory monitor killed. `detail`: Ray's own message (Ray
    2.60)."""
    found = re.search(r"was ([\d.]+ ?[KMGT]?B) used / ([\d.]+ ?[KMGT]?B) limit", detail)
    used = f", with {found[1]} of {found[2]} in use" if found else ""
    return (
        f"Ray's memory monitor killed its process because its node ran out of memory{used}: {remedy(field)}"
    )


def _last_line(cause: Any) -> str:
    """Returns the last line of the GCS's record of an actor's death."""
    kind = cause.WhichOneof("context")
    info = getattr(cause, kind) if kind else None
    text = getattr(info, "formatted_exception_string", "") or getattr(info, "error_message", "")
    lines = [line for line in str(text).splitlines() if line.strip()]
    if kind == "actor_unschedulable_context":
        return " ".join(lines)
    return lines[-1].strip() if lines else "Ray gives no reason"


def _end_when_gone(address: str, raylet: int | None) -> None:
    """Ends this process with EXIT_RAY_LOST once its raylet has ended, or nothing has listened at the GCS's address for
    GCS_GONE_S. `raylet` is the raylet's pidfd.

    A driver's calls to Ray hang once the driver has lost either of them.
    """
    gcs = parse_address(address)
    seen = time.monotonic()
    while time.monotonic() - seen < GCS_GONE_S:
        if select.select([raylet] if raylet is not None else [], [], [], 0.5)[0]:
            _end(EXIT_RAY_LOST, "Ray is gone: this node's raylet has ended")
        with contextlib.suppress(OSError):
            socket.create_connection(gcs, timeout=1.0).close()
            seen = time.monotonic()
    _end(EXIT_RAY_LOST, f"Ray is gone: nothing has listened at {address} for {GCS_GONE_S:.0f} s")


def _raylet_pidfd() -> int | None:
    """Returns a pidfd of the raylet to which this driver is connected; None if the raylet is in another PID
    namespace."""
    node: Any = ray_worker._global_node  # noqa: SLF001  no public way to one's own raylet
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(node.raylet_socket_name)
        pid, _, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return os.pidfd_open(pid) if pid else None


def _end(code: int, text: str) -> NoReturn:
    """Ends the process from any thread, even if the main thread hangs."""
    log.error("%s", text)
    logging.shutdown()
    os._exit(code)


@contextlib.contextmanager
def _deadline(seconds: float, text: str) -> Iterator[None]:
    """Ends this process with EXIT_RAY_LATE, and logs `text`, unless the block ends in time."""

    timer = threading.Timer(seconds, _end, (EXIT_RAY_LATE, text))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
