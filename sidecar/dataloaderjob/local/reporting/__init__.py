"""The report of a run on this machine: what is kept while it runs, and the page made of it."""
