"""A sitecustomize module. Python imports a copy of it at startup, in the script that `dataloaderjob advise` runs and in
the processes that the script starts.

The copy installs the hook once torch's loader is imported, and runs the sitecustomize module that Python would
otherwise have imported. The folder that contains the copy is in the results folder.
"""

import importlib.machinery
import importlib.util
import os
import sys

_TARGET = "torch.utils.data.dataloader"


class _Finder:
    """A finder that installs the hook as soon as _TARGET is imported, no matter which finder locates _TARGET."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]  # noqa: ARG004
        if name != _TARGET:
            return None
        sys.meta_path[:] = [one for one in sys.meta_path if one is not _Finder]
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_hook(module):  # type: ignore[no-untyped-def]
                execute(module)
                try:
                    from dataloaderjob.advise import hook
                except ImportError as exc:
                    _say(f"{sys.executable}: {exc}")
                else:
                    hook.install(module, _folder)

            spec.loader.exec_module = execute_and_hook  # type: ignore[method-assign]
        return spec


def _say(trouble: str) -> None:
    with open(os.path.join(_folder, f"{os.getpid()}.trouble"), "w") as file:
        file.write(trouble)


_own = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [one for one in sys.path if os.path.abspath(one or ".") != _own]
_folder = os.path.dirname(_own)
sys.meta_path.insert(0, _Finder)
_next = importlib.machinery.PathFinder.find_spec("sitecustomize")
if _next is not None and _next.loader is not None:
    _next.loader.exec_module(importlib.util.module_from_spec(_next))
