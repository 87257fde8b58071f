"""Names shared by processes on one machine: files of a private service, and environment variables. This module imports
nothing."""

SOCKET_NAME = "s"
"""The sidecar's socket."""
CONTROL_NAME = "c"
"""Socket on which a datagram makes the service read FEEDERS_NAME."""
HOST_NAME = "f"
"""The feeder host's socket."""
FEEDERS_NAME = "feeders"
"""File with the number of feeders that ranks have requested so far."""
PID_NAME = "pid"
"""File with the pid and start time of the service. It does not exist once the service has failed."""
FAILED_NAME = "failed"
"""File with the reason why the service failed."""
LAUNCH_NAME = "launch"
"""File that identifies the launch that a service serves, if the service outlives scripts."""
IMPORTED_NAME = "imported"
"""File that lists the files of the modules that the service's feeders have imported (`core.imported`)."""
VERDICT_NAME, VERDICT_PART = "verdict", ".verdict"
"""File with the verdict on the script's input (`local.verdicts`), and its name while it is being written."""
LOCK_NAME = "lock"
LOG_NAME = "service.log"
FILES = (
    SOCKET_NAME,
    "~",  # the sidecar's socket before it is renamed (`sidecar.listeners`)
    CONTROL_NAME,
    HOST_NAME,
    FEEDERS_NAME,
    LAUNCH_NAME,
    PID_NAME,
    FAILED_NAME,
    ".failed",
    IMPORTED_NAME,
    f"{IMPORTED_NAME}.part",
    VERDICT_NAME,
    VERDICT_PART,
    LOCK_NAME,
    LOG_NAME,
)
"""All files that a private service's folder may contain."""

SOCKET_VARIABLE = "DATALOADERJOB_SOCKET"
PREFETCH_VARIABLE = "DATALOADERJOB_PREFETCH"
FEEDERS_VARIABLE = "DATALOADERJOB_FEEDERS"
ALLOW_PICKLE_VARIABLE = "DATALOADERJOB_ALLOW_PICKLE"
FOLDER_VARIABLE = "DATALOADERJOB_DIR"
KEEP_VARIABLE = "DATALOADERJOB_KEEP"
PATH_VARIABLE = "DATALOADERJOB_PATH"
RUN_VARIABLE = "DATALOADERJOB_RUN_ID"
IMPORTED_VARIABLE = "DATALOADERJOB_IMPORTED"
IN_FEEDER_VARIABLE = "DATALOADERJOB_IN_FEEDER"
NODE_FOLDER_VARIABLE = "DATALOADERJOB_NODE_FOLDER"
RAY_TASKS_VARIABLE = "DATALOADERJOB_RAY_TASKS"
"""Environment variable that is set on a Ray node on which user code may start tasks."""
DISTRIBUTED_VARIABLE = "DATALOADERJOB_DISTRIBUTED"
RECORD_VARIABLE = "DATALOADERJOB_RECORD"
LAUNCHERS = "RAY|SLURM|OMPI|PMIX?|PRTE"
"""Prefixes of the names of launchers' environment variables, as a regular expression."""
RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
"""Environment variables in which launchers set a process's rank. The first one that is set counts."""
SHARES = (
    *RANK_VARIABLES, "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "GLOBAL_RANK",
    "NODE_RANK", "NNODES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID",
)  # fmt: skip
"""Environment variables that datasets use for sharding."""
REMEDY = "set DATALOADERJOB_DIR to a folder of your own that others cannot write to"
