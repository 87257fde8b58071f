"""Names that processes of one machine share: files of a private service, variables. It imports nothing."""

SOCKET_NAME = "s"
"""The sidecar's."""
CONTROL_NAME = "c"
"""A datagram to it makes the service read FEEDERS_NAME."""
HOST_NAME = "f"
"""The feeder host's socket."""
FEEDERS_NAME = "feeders"
"""The number of feeders that ranks have asked for so far."""
PID_NAME = "pid"
"""Pid and start time of the service; absent once it gave up."""
FAILED_NAME = "failed"
"""Why it gave up."""
LOCK_NAME = "lock"
LOG_NAME = "service.log"
FILES = (
    SOCKET_NAME,
    "~",  # the same, for a moment (`sidecar.listeners`)
    CONTROL_NAME,
    HOST_NAME,
    FEEDERS_NAME,
    PID_NAME,
    FAILED_NAME,
    ".failed",
    LOCK_NAME,
    LOG_NAME,
)
"""All that may be in a private service's folder."""

SOCKET_VARIABLE = "DATALOADERJOB_SOCKET"
PREFETCH_VARIABLE = "DATALOADERJOB_PREFETCH"
FEEDERS_VARIABLE = "DATALOADERJOB_FEEDERS"
ALLOW_PICKLE_VARIABLE = "DATALOADERJOB_ALLOW_PICKLE"
FOLDER_VARIABLE = "DATALOADERJOB_DIR"
PATH_VARIABLE = "DATALOADERJOB_PATH"
RUN_VARIABLE = "DATALOADERJOB_RUN_ID"
IN_FEEDER_VARIABLE = "DATALOADERJOB_IN_FEEDER"
NODE_FOLDER_VARIABLE = "DATALOADERJOB_NODE_FOLDER"
RECORD_VARIABLE = "DATALOADERJOB_RECORD"
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Where launchers say which rank a process is; the first that is set counts."""
VARIABLES = (
    (
        SOCKET_VARIABLE, "job", "trainer", "the private service of the script",
        "Path of the sidecar's Unix socket. A script by itself has none and starts feeders of its own.",
    ),
    (
        FEEDERS_VARIABLE, "job, you", "trainer", "CPUs of the process less one, from 1 to 8",
        "Number of the job's feeders; a script by itself starts as many where `num_workers` is left out.",
    ),
    (
        PREFETCH_VARIABLE, "job, you", "trainer", "twice the number of feeders, 16 at least",
        "Batches that the sampler is ahead where `prefetch_factor` is left out: `spec.loader.prefetch`.",
    ),
    (
        ALLOW_PICKLE_VARIABLE, "job, you", "trainer", "not allowed",
        "`1`: batches may hold objects that only pickle can carry, as with `allow_pickle=True`.",
    ),
    (
        RECORD_VARIABLE, "`dataloaderjob run --record`, you", "trainer", "nothing is recorded",
        "Folder in which each trainer process writes down what it takes, for `verify` and `replay`.",
    ),
    (
        FOLDER_VARIABLE, "you", "trainer", "`dataloaderjob` in `XDG_RUNTIME_DIR`, else in the temporary folder",
        "Folder for the socket and files of a script's own service; others may not write to it.",
    ),
    (
        IN_FEEDER_VARIABLE, "feeder", "trainer", "not in a feeder",
        "`1` in feeders: a loader that is iterated there is refused, since it would wait for itself.",
    ),
    (
        PATH_VARIABLE, "trainer", "private service", "Python's own",
        "The trainer's import path; the feeders of a script by itself get it as `PYTHONPATH`.",
    ),
    (
        RUN_VARIABLE, "`dataloaderjob run`, trainer", "the same, private service", "none",
        "Tag in the environment of all processes of one run, by which none of them is left behind.",
    ),
    (
        NODE_FOLDER_VARIABLE, "feeders' pod", "feeders", "a folder of their own",
        "Folder of the pod in which its feeders keep blobs and find the socket for their output.",
    ),
)  # fmt: skip
"""A row for each variable: name, who sets it, who reads it, what holds without it, meaning. Of these rows
docs/reference/environment.md is made."""
REMEDY = "set DATALOADERJOB_DIR to a folder of yours that others may not write to"
