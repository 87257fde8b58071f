"""The entry point of `python -m dataloaderjob`, which is the same as the command `dataloaderjob`."""

from dataloaderjob.local.cli import main

raise SystemExit(main())
