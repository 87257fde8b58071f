"""The process that stands in for supervisors and a scheduler, so that their CPU is not the operator's.

It is run as `python -m bench.operator_scale.stand_ins`. The first line of stdin has its settings as JSON, and each
further line is a mode of the supervisors. It exits at the end of stdin.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from bench.operator_scale.api import connected
from bench.operator_scale.binding import bind_all
from bench.operator_scale.supervisors import Mode, Supervisors


async def run(settings: dict[str, Any]) -> None:
    supervisors = Supervisors(bytes.fromhex(settings["root_key"]), feeders=settings["feeders"])
    async with (
        connected(settings["url"], settings["token"]) as api,
        supervisors.serving("0.0.0.0", settings["port"]),
    ):
        print("ready", flush=True)
        tasks = [
            asyncio.create_task(bind_all(api, settings["nodes"])),
            asyncio.create_task(_obey(supervisors)),
        ]
        done, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        for task in done:
            task.result()


async def _obey(supervisors: Supervisors) -> None:
    """Sets modes until the end of stdin."""
    reader = asyncio.StreamReader()
    await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    while line := await reader.readline():
        supervisors.set_mode(Mode(line.decode().strip()))


if __name__ == "__main__":
    asyncio.run(run(json.loads(sys.stdin.readline())))
