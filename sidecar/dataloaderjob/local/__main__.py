"""`python -m dataloaderjob.local --dir DIR --feeders N`: forks the feeder host, then becomes the private service.

The host imports torch, which takes longer than the rest of the startup. The host is therefore forked before this
process imports anything that is not essential. DIR is the private folder that the first rank created
(`trainer.session.private`).
"""

from __future__ import annotations

import sys

from dataloaderjob.local.forks import fork_host


def main() -> int:
    """Forks the host, then becomes the service."""
    host = fork_host(sys.argv[sys.argv.index("--dir") + 1])
    from dataloaderjob.local import service

    return service.main(host)


if __name__ == "__main__":
    sys.exit(main())
