"""`dataloaderjob map`: applies a function to a dataset and writes the results as Parquet files."""
