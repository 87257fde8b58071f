"""The operator's process with shorter waits: `python sooner.py MODULE.NAME=SECONDS... -- ARGUMENT...`

A constant is set in the module that uses it, which is named below dataloaderjob_operator.
"""

from __future__ import annotations

import importlib
import os
import sys

from kubernetes.aio.config import kube_config

from dataloaderjob_operator.__main__ import main


def shorten(setting: str) -> None:
    """Sets a constant. Raises AttributeError if its module has none of this name."""
    where, _, seconds = setting.partition("=")
    module, _, name = where.rpartition(".")
    found = importlib.import_module(f"dataloaderjob_operator.{module}")
    if not float(seconds) < getattr(found, name):
        raise ValueError(f"{where} is to be less than {getattr(found, name)}, found {seconds}")
    setattr(found, name, float(seconds))


if __name__ == "__main__":
    kube_config.KUBE_CONFIG_DEFAULT_LOCATION = os.environ[
        "KUBECONFIG"
    ]  # read at its import, before this fork
    _end = sys.argv.index("--")
    for _setting in sys.argv[1:_end]:
        shorten(_setting)
    del sys.argv[1 : _end + 1]
    sys.exit(main())
