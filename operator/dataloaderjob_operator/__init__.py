"""The operator: DataLoaderJobs become Ray heads, feeders and trainers with sidecars. See ARCHITECTURE.md."""
