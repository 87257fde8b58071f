"""The watch of a job on a cluster, for a report. It uses kubectl to find the head's pod and to read the supervisor's
status there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dataloaderjob.core.errors import InputError
from dataloaderjob.core.texts import clean
from dataloaderjob.core.timings import Times, unpacked
from dataloaderjob.local.reporting.rundata import RunData
from dataloaderjob.local.reporting.watching import Watched

CONTAINERS = ("supervisor", "head")
"""Containers of the head's pod that may have the job's key. The first of them that exists is used."""
MODULE = "dataloaderjob.pod.status"
TIMES_MODULE = "dataloaderjob.pod.times"
SELECTOR = "dataloading.dev/job={},dataloading.dev/role={}"
MOST_PODS, PARALLEL = 64, 8
"""Maximum number of feeder pods to query, in total and at a time."""
LEAST_S, MOST_S = 5, 3600
TOLD_EVERY_S = 10.0
MAX_WHY = 400


def watch(namespace: str, job: str, seconds: int) -> RunData:
    """Watches a job for some seconds, or until the user interrupts the watch. Raises InputError if the job cannot be
    watched."""
    if not LEAST_S <= seconds <= MOST_S:
        raise InputError(f"--seconds must be between {LEAST_S} and {MOST_S}, got {seconds}")
    pod, container, settings = _head(namespace, job)
    command = [
        "exec", "-n", namespace, pod, "-c", container, "--", "python", "-P", "-m", MODULE, "--settings", settings,
        "--looks", str(seconds + 1),
    ]  # fmt: skip
    watched, began, started = Watched(), time.monotonic(), time.time()
    _say(f"watching {namespace}/{job} for {seconds} s: Ctrl-C ends it early")
    told = 0.0
    try:
        for status in _statuses(command):
            at = time.monotonic() - began
            watched.see(at, status)
            if at >= seconds:
                break
            if at - told >= TOLD_EVERY_S:
                told = at
                _say(f"{at:.0f} of {seconds} s")
    except KeyboardInterrupt:
        _say("interrupted: the report covers the time until now")
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise InputError(f"cannot read the answer of the supervisor in {pod}: {exc!r}") from exc
    if not watched.series.readings:
        raise InputError(
            f"the supervisor in {pod} did not report anything: try again once the job is Running"
        )
    about = {"name": f"{namespace}/{job}", "started": started, "watched": True, "verdict": watched.verdict()}
    return RunData(about, watched.series, watched.times(_times(namespace, job)), is_live=True)


def _times(namespace: str, job: str) -> Times:
    """Returns the times of individual batches in all feeder pods, if the pods report them."""
    total, silent = Times(), 0
    pods = _pods(namespace, SELECTOR.format(job, "feeder"))[:MOST_PODS]
    with ThreadPoolExecutor(PARALLEL) as pool:
        for found in pool.map(lambda pod: _times_of(namespace, pod), pods):
            if found is None:
                silent += 1
            else:
                total.add(found)
    if silent:
        _say(f"{silent} of {len(pods)} feeder pods did not report the times of their batches")
    return total


def _times_of(namespace: str, pod: Mapping[str, Any]) -> Times | None:
    name = str(pod["metadata"]["name"])
    try:
        text = _run(["exec", "-n", namespace, name, "-c", "feeder", "--", "python", "-P", "-m", TIMES_MODULE])
        return unpacked(json.loads(text))
    except (InputError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _head(namespace: str, job: str) -> tuple[str, str, str]:
    """Returns the head's pod, the container with the job's key, and the path of its settings file."""
    ready = _pods(namespace, SELECTOR.format(job, "head"))
    if not ready:
        raise InputError(
            f"found no ready head pod for DataLoaderJob {job} in namespace {namespace}: the job must be running "
            f"(check with `kubectl get dlj -n {namespace}`)"
        )
    containers = {one["name"]: one.get("command", []) for one in ready[0]["spec"]["containers"]}
    for name in CONTAINERS:
        if "--settings" in containers.get(name, ()):
            return (
                str(ready[0]["metadata"]["name"]),
                name,
                str(containers[name][containers[name].index("--settings") + 1]),
            )
    raise InputError(
        f"the head pod of {job} has no container with a supervisor: use the `dataloaderjob` of its release"
    )


def _pods(namespace: str, selector: str) -> list[dict[str, Any]]:
    """Returns the ready pods."""
    listed = json.loads(_run(["get", "pods", "-n", namespace, "-l", selector, "-o", "json"]))
    return [pod for pod in listed["items"] if _is_ready(pod)]


def _is_ready(pod: Mapping[str, Any]) -> bool:
    conditions = pod["status"].get("conditions", ())
    is_ready = any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)
    return is_ready and "deletionTimestamp" not in pod["metadata"]


def _run(args: Sequence[str]) -> str:
    done = _start(args)
    out, errors = done.communicate()
    if done.returncode:
        raise _failed(args, errors)
    return out


def _statuses(args: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the statuses that the command prints, one on each line. Raises InputError if the command fails before it
    has printed a line."""
    running, seen = _start(args), False
    assert running.stdout is not None  # noqa: S101
    try:
        for line in running.stdout:
            yield dict(json.loads(line))
            seen = True
        errors = running.communicate()[1]
        if running.returncode and not seen:
            raise _failed(args, errors)
        if running.returncode:
            _say(f"the watch ended early: {clean(errors.strip(), MAX_WHY)}")
    finally:
        running.kill()
        running.communicate()


def _start(args: Sequence[str]) -> subprocess.Popen[str]:
    try:
        return subprocess.Popen(["kubectl", *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError as exc:
        raise InputError(
            "--namespace requires kubectl, which was not found: install it, or add it to PATH"
        ) from exc


def _failed(args: Sequence[str], errors: str) -> InputError:
    return InputError(f"kubectl {args[0]} failed: {clean(errors.strip(), MAX_WHY) or 'it printed nothing'}")


def _say(text: str) -> None:
    sys.stderr.write(f"dataloaderjob: {text}\n")
