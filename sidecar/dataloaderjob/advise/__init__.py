"""`dataloaderjob advise`: watches the loaders of an unchanged script, and works out whether feeders would help."""
