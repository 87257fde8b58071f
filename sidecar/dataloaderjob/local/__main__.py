"""`python -m dataloaderjob.local --dir DIR --feeders N`: the private service, with its feeder host first.

The host imports torch, which takes longer than all the rest of a start: so it is started before this process
imports anything that it can do without. DIR is the private folder that the first rank made (`trainer.private`).
"""

from __future__ import annotations

import os
import sys

from dataloaderjob.local.feeder_host import start_host


def main() -> int:
    """Starts the host, then becomes the service."""
    if "--echo" in sys.argv:  # the host would keep it open for longer than the rank that reads it lives
        os.set_inheritable(int(sys.argv[sys.argv.index("--echo") + 1]), False)
    host = start_host(sys.argv[sys.argv.index("--dir") + 1])
    from dataloaderjob.local import service

    return service.main(host)


if __name__ == "__main__":
    sys.exit(main())
