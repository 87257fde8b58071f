"""`dataloaderjob advise`: it watches the loaders of an unchanged script, and determines whether feeders would help."""
