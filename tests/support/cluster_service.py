"""A service of this machine by either provider, for as long as this process lives: its socket is DIR/s.

python cluster_service.py DIR FEEDERS PROVIDER
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from dataloaderjob.local.children import Loop
from dataloaderjob.local.cluster import LocalCluster
from dataloaderjob.local.service_plan import ServicePlan


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def main(folder: Path, feeders: int, provider: str) -> int:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "DATALOADERJOB_"))}
    plan = ServicePlan(
        job="faults", num_feeders=feeders, env=env, feeder_env={**env, "PYTHONHASHSEED": "0"}, feeder_cwd=Path.cwd(),
        provider=provider, metrics_port=0,
    )  # fmt: skip
    over: list[str] = []
    loop = Loop()
    loop.signals((signal.SIGTERM,), lambda _: over.append("SIGTERM came"))
    cluster = LocalCluster(
        plan, loop, socket_path=str(folder / "s"), broken=over.append,
        show=lambda who, text, _: say(f"[{who}] {text}"),
    )  # fmt: skip
    try:
        cluster.start({"folder": str(folder)})
        loop.run(until=lambda: bool(over))
    finally:
        cluster.close()
    say(over[0])
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]))
