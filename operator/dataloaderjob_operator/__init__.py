"""The operator turns DataLoaderJobs into Ray heads, feeders, and trainers with sidecars. See ARCHITECTURE.md."""
