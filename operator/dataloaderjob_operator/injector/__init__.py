"""The injector: the webhook that adds a job's sidecar to labelled pods. It is a separate process, in several replicas,
because labelled pods cannot start without it. It reads DataLoaderJobs and writes only its own certificates.
"""
