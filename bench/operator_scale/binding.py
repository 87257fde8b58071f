"""Binds each new pod to a fake node, in turns. There is no scheduler, and nothing to choose."""

from __future__ import annotations

import asyncio
import itertools
import sys
from typing import Any

import aiohttp

from bench.operator_scale.api import METADATA, Api

AT_ONCE = 24


async def bind_all(api: Api, nodes: list[str]) -> None:
    """Binds pods until cancelled."""
    waiting: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    turns = itertools.cycle(nodes)
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(_worker(api, waiting, turns))
        async for event in api.watch("/api/v1/pods?fieldSelector=spec.nodeName%3D", accept=METADATA):
            if event["type"] == "ADDED":
                waiting.put_nowait(event["object"]["metadata"])


async def _worker(api: Api, waiting: asyncio.Queue[dict[str, Any]], turns: itertools.cycle[str]) -> None:
    while True:
        pod = await waiting.get()
        path = f"/api/v1/namespaces/{pod['namespace']}/pods/{pod['name']}/binding"
        binding = {
            "apiVersion": "v1", "kind": "Binding", "metadata": {"name": pod["name"]},
            "target": {"apiVersion": "v1", "kind": "Node", "name": next(turns)},
        }  # fmt: skip
        try:
            await api.request("POST", path, binding)
        except aiohttp.ClientResponseError as exc:
            if exc.status not in {404, 409}:  # gone, or bound already
                waiting.put_nowait(_again(pod, exc))
        except (aiohttp.ClientError, OSError) as exc:
            waiting.put_nowait(_again(pod, exc))


def _again(pod: dict[str, Any], why: Exception) -> dict[str, Any]:
    print(f"pod {pod['namespace']}/{pod['name']} is bound later: {why!r}", file=sys.stderr, flush=True)
    return pod
