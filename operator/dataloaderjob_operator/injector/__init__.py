"""The injector: the webhook that adds a job's sidecar to labeled pods. It is a separate process with several replicas,
because labeled pods cannot start without it. It reads DataLoaderJobs, and writes only its own certificates.
"""
