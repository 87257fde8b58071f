"""Forks Python processes that have imported some modules already: `python warm_server.py SOCKET MODULE...`

An import of torch takes 2 CPU seconds, of lightning or transformers 6; a fork takes 20 ms. In the child a program finds
what a fresh interpreter would give it: `__main__`, sys.argv, sys.path, environment, folder, standard streams, and the
end by the interpreter. It does not find hashes of its own, nor variables that those modules read at their import.

One connection for each process: a request, with its three standard descriptors, is answered by {"pid"}, and at the end
by {"status", "cpu_s"}. `warm.py` is the other side.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import random
import resource
import runpy
import select
import signal
import socket
import sys
import types
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1
REQUEST_NBYTES = 1 << 18


def die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(listener: socket.socket) -> dict[str, Any] | None:
    """Returns None in the server at the end of its standard input, the request in a child."""
    running: dict[int, tuple[int, socket.socket]] = {}  # by pidfd
    while True:
        ready, _, _ = select.select([0, listener, *running], [], [])
        for pidfd in running.keys() & set(ready):
            pid, connection = running.pop(pidfd)
            _, status, usage = os.wait4(pid, 0)
            os.close(pidfd)
            with connection, contextlib.suppress(OSError):
                connection.send(json.dumps({"status": status, "cpu_s": _cpu_s(usage)}).encode())
        if listener in ready:
            connection, _ = listener.accept()
            data, descriptors, _, _ = socket.recv_fds(connection, REQUEST_NBYTES, 3)
            pid = os.fork()
            if pid == 0:
                become(json.loads(data), descriptors)
                return json.loads(data)
            for descriptor in descriptors:
                os.close(descriptor)
            running[os.pidfd_open(pid)] = (pid, connection)
            connection.send(json.dumps({"pid": pid}).encode())
        if 0 in ready:
            return None


def _given_path() -> list[str]:
    return [p for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]


def _cpu_s(usage: resource.struct_rusage) -> float:
    return usage.ru_utime + usage.ru_stime


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Makes this process, but for its `__main__`, the one that the shell would have started."""
    die_with_parent()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115
    unbuffered = bool(request["environment"].get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stdout.reconfigure(write_through=unbuffered)
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    random.seed()
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()
        if "OMP_NUM_THREADS" in os.environ:
            torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def run(arguments: list[str], installed: list[str]) -> None:
    """The program: what it raises ends this process as it would end an interpreter. `arguments`: as python has them."""
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path[:] = [*_given_path(), *installed]
    first, rest = arguments[0], arguments[1:]
    if first == "-m":
        sys.argv[:] = rest
        sys.path.insert(0, os.getcwd())
        runpy._run_module_as_main(rest[0], alter_argv=True)  # type: ignore[attr-defined]
        return
    if first == "-c":
        sys.argv[:] = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        code = compile(rest[0], "<string>", "exec")
    else:
        sys.argv[:] = arguments
        sys.path.insert(0, str(Path(first).resolve().parent))
        module.__file__ = first
        module.__loader__ = importlib.machinery.SourceFileLoader("__main__", first)
        code = compile(Path(first).read_bytes(), first, "exec")
    exec(code, module.__dict__)


if __name__ == "__main__":
    die_with_parent()
    _socket, *_modules = sys.argv[1:]
    _installed = sys.path[1:]
    for _name in _modules:
        importlib.import_module(_name)
    gc.collect()
    gc.freeze()
    _listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _listener.bind(_socket)
    _listener.listen(16)
    os.write(1, b"ready\n")
    _request = serve(_listener)
    if _request is not None:
        _server = sys.modules["__main__"]  # kept: it has this very code
        run(_request["arguments"], _installed)
