"""`python -m dataloaderjob` is the command `dataloaderjob`."""

from dataloaderjob.local.cli import main

raise SystemExit(main())
