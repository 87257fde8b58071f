"""`python -m dataloaderjob.sidecar --settings FILE`: the sidecar process."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dataloaderjob.core.errors import DataLoaderJobError, first_line
from dataloaderjob.core.settings import SidecarSettings, load
from dataloaderjob.sidecar.parent import Sidecar


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="dataloaderjob.sidecar", description="Serves batches to the trainers in this pod."
    )
    parser.add_argument("--settings", required=True, type=Path, help="JSON file of SidecarSettings")
    args = parser.parse_args()
    try:
        sidecar = Sidecar(load(SidecarSettings, args.settings), args.settings)
    except (DataLoaderJobError, OSError) as exc:
        sys.stderr.write(f"sidecar: {first_line(exc)}\n")
        return 2
    port = None if sidecar.http is None else sidecar.http.port
    sys.stdout.write(json.dumps({"socket": sidecar.settings.socket, "metrics_port": port}) + "\n")
    sys.stdout.flush()
    sidecar.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
