"""The report of a run on this machine: the data kept during the run, and the page rendered from it."""
