"""The command `dataloaderjob advise`, which watches the loaders of an unchanged script and determines whether feeders
would help."""
