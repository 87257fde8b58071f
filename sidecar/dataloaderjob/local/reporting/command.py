"""`dataloaderjob report`: writes the report on a run as a page."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dataloaderjob.core.errors import InputError
from dataloaderjob.local.outputs import write_output
from dataloaderjob.local.reporting import on_cluster, rundata
from dataloaderjob.local.reporting.rundata import RunData

WATCH_S = 60
"""Seconds for which a job on a cluster is watched by default."""


def report(which: str | None, output: Path, *, namespace: str | None = None, seconds: int = WATCH_S) -> str:
    """Writes the report and returns a line about it. `namespace`: if given, `which` is a job in this namespace of a
    cluster, and is watched for `seconds`.

    Raises InputError if there is nothing to show, or not enough disk space.
    """
    page = _page()
    if namespace is not None and which is None:
        raise InputError("--namespace requires the name of a job: dataloaderjob report -n NAMESPACE JOB")
    if output.is_dir():
        raise InputError(
            f"--output must be a file, but {output} is a folder: name a file in it, such as report.html"
        )
    data = rundata.find(which) if namespace is None else on_cluster.watch(namespace, str(which), seconds)
    text = page(data)
    write_output(output, text)
    return f"{output}: report of {data.name}, {len(text.encode()) / 1e3:.0f} kB"


def _page() -> Callable[[RunData], str]:
    try:
        from dataloaderjob.local.reporting.page import render
    except ModuleNotFoundError as exc:
        needed = str(exc.name).partition(".")[0]
        raise InputError(
            f"report requires the module {needed!r}: pip install 'dataloaderjob[report]'"
        ) from exc
    return render
