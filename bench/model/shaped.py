"""A service of this machine whose feeders are in another network namespace: its socket is FOLDER/s.

    python -m bench.model.shaped FOLDER FEEDERS NAMESPACE

Everything is that of a run but two settings: where the feeder host is started, and the addresses.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench import links
from dataloaderjob.core.settings import SupervisorSettings
from dataloaderjob.core.sockets import EVERYWHERE
from dataloaderjob.local import cluster
from dataloaderjob.local.children import Loop
from dataloaderjob.local.forks import host_command
from dataloaderjob.local.service_plan import ServicePlan, supervisor_settings
from dataloaderjob.providers.provider import LOCAL


def main(folder: Path, feeders: int, namespace: str) -> int:
    def apart(plan: ServicePlan, home: Path, port: int, more: Mapping[str, Any]) -> SupervisorSettings:
        places = {
            "bind_host": EVERYWHERE,
            "feeder_supervisor_host": links.NEAR,
            "feeder_bind_host": links.FAR,
        }
        return supervisor_settings(plan, home, port, {**more, **places})

    cluster.supervisor_settings = apart
    cluster.host_command = lambda path: ["ip", "netns", "exec", namespace, *host_command(path)]
    env = {k: v for k, v in os.environ.items() if not k.startswith("DATALOADERJOB_")}
    plan = ServicePlan(
        job="model", num_feeders=feeders, env=env, feeder_env=env, feeder_cwd=folder, provider=LOCAL,
    )  # fmt: skip
    over: list[str] = []
    loop = Loop()
    loop.signals((signal.SIGTERM,), lambda _: over.append(""))
    service = cluster.LocalCluster(
        plan, loop, socket_path=str(folder / "s"), broken=over.append, record=folder / "record",
        show=lambda who, text, _: print(f"[{who}] {text}", file=sys.stderr, flush=True),
    )  # fmt: skip
    try:
        service.start({"folder": str(folder)})
        loop.run(until=lambda: bool(over))
    finally:
        service.close()
    if over[0]:
        print(over[0], file=sys.stderr)
    return int(bool(over[0]))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
