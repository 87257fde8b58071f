"""The report of a run on this machine: the data kept while it runs, and the page rendered from them."""
