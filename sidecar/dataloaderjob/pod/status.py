"""A command that prints the status of a job's supervisor as lines of JSON, for `dataloaderjob report` on a cluster.

    python -m dataloaderjob.pod.status --settings FILE.json --looks N

`dataloaderjob report` runs this command in the head's pod, which has the job's key. The command uses the settings of
the pod's main process.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from dataloaderjob.core import supervision
from dataloaderjob.core.errors import DataLoaderJobError
from dataloaderjob.core.settings import read_credentials, read_key

EVERY_S = 1.0
EXIT_SILENT = 1
MISSES = 10
"""Number of consecutive requests without an answer after which this command gives up."""


def main() -> int:
    parser = argparse.ArgumentParser(description="prints a supervisor's status once a second")
    parser.add_argument("--settings", type=Path, required=True, help="JSON file of the pod's main process")
    parser.add_argument("--looks", type=int, required=True, help="number of lines")
    args = parser.parse_args()
    settings = json.loads(args.settings.read_text())
    key, port, job = read_key(settings["key_path"]), settings["supervisor_port"], settings["job"]
    tls = read_credentials(settings.get("tls_folder", ""))
    misses = 0
    for number in range(args.looks):
        if number:
            time.sleep(EVERY_S)
        try:
            status = supervision.ask("127.0.0.1", port, key, job=job, message={"type": "status"}, tls=tls)
            misses = 0
        except (OSError, DataLoaderJobError) as exc:
            status, misses = {}, misses + 1
            if misses == MISSES:
                sys.stderr.write(f"the supervisor does not respond: {exc}\n")
                return EXIT_SILENT
        try:
            sys.stdout.write(f"{json.dumps(status)}\n")
            sys.stdout.flush()
        except BrokenPipeError:  # nobody reads anymore
            return EXIT_SILENT
    return 0


if __name__ == "__main__":
    sys.exit(main())
