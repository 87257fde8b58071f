"""`dataloaderjob map`: a function over a dataset, its results as Parquet files."""
