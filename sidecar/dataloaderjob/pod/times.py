"""A command that prints, as JSON, the times that a feeder pod's builders took to make batches, for `dataloaderjob
report` on a cluster.

    python -m dataloaderjob.pod.times
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from dataloaderjob.core import timings
from dataloaderjob.core.settings import NODE_FOLDER, TEMP_DIR
from dataloaderjob.core.timings import TIMES, Times


def main() -> int:
    parser = argparse.ArgumentParser(
        description="prints the times of batches that this pod's feeders have made"
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path(TEMP_DIR) / NODE_FOLDER / TIMES,
        help="folder of the builders' files",
    )
    total = Times()
    for _, _, path in timings.files(parser.parse_args().folder):
        if (times := timings.read(path)) is not None:
            total.add(times)
    sys.stdout.write(f"{json.dumps(timings.packed(total))}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
