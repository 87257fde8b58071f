"""The user's script: loading it, and looking up the dataset and the functions in it.

The script is loaded as `__main__`, but its `__name__` is `__mp_main__`, as in workers that multiprocessing spawns. Code
below `if __name__ == "__main__":` therefore does not run.
"""

from __future__ import annotations

import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from dataloaderjob.core.errors import InputError, UserCodeError
from dataloaderjob.making.fetcher import seed_generators

_NAME = "__mp_main__"
_T = TypeVar("_T")


class Script:
    """A loaded script."""

    def __init__(self, path: Path) -> None:
        """Raises InputError if the file does not exist. Raises UserCodeError if the script raises an exception."""
        if not path.is_file():
            raise InputError(f"there is no file {path}: name a Python script")
        self.name = path.name
        self.text = path.read_bytes()
        sys.path[0:0] = [str(path.absolute().parent)]
        sys.argv[:] = [str(path)]
        # Random values in the script, such as the weights of a model, must be the same when the work is resumed.
        seed_generators(0)
        main = types.ModuleType(_NAME)
        main.__file__ = str(path.absolute())
        sys.modules["__main__"] = sys.modules[_NAME] = main
        self._globals = vars(main)
        called(path.name, self._execute)

    def _execute(self) -> None:
        # The script must not inherit this module's `from __future__`.
        code = compile(self.text, self._globals["__file__"], "exec", dont_inherit=True)
        exec(code, self._globals)  # noqa: S102  the user's own script

    def get(self, name: str) -> Any:
        """Returns the object with this name. Raises InputError if the script has no such name."""
        try:
            return self._globals[name]
        except KeyError:
            names = sorted(n for n in self._globals if not n.startswith("_"))
            raise InputError(f"{self.name} has no {name!r}, only {', '.join(names) or 'nothing'}") from None

    def function(self, name: str) -> Callable[[Any], Any]:
        """Returns a function, a torch.nn.Module, or a class whose instances can be called."""
        found = self.get(name)
        called_on = found.__mro__ if isinstance(found, type) else ()
        if not callable(found) or (called_on and not any("__call__" in vars(cls) for cls in called_on)):
            what = "a class without __call__" if called_on else type(found).__name__
            raise InputError(
                f"{name} in {self.name} must be a function, a torch.nn.Module, or a class with callable "
                f"instances, but is {what}"
            )
        return found  # type: ignore[no-any-return]

    def collate_fn(self, name: str) -> Callable[[Any], Any]:
        found = self.get(name)
        if not callable(found):
            raise InputError(
                f"{name} in {self.name} must be a function, but is of type {type(found).__name__}"
            )
        return found  # type: ignore[no-any-return]

    def dataset(self, name: str) -> Any:
        """Returns a dataset with a length. If `name` is a class or a function, calls it to create the dataset."""
        found = self.get(name)
        if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
            found = called(f"{name} in {self.name}", found)
        if isinstance(found, IterableDataset):
            raise InputError(
                f"{name} in {self.name} is an IterableDataset, whose samples have no index to write with a "
                "result: map requires a dataset with __getitem__ and __len__"
            )
        if not hasattr(found, "__getitem__") or not hasattr(found, "__len__"):
            raise InputError(
                f"{name} in {self.name} must be a dataset with __getitem__ and __len__, or a function "
                f"without arguments that returns one, but is of type {type(found).__name__}"
            )
        return found


def called(who: str, function: Callable[[], _T]) -> _T:
    """Calls the user's code. Raises UserCodeError, with the traceback, for any exception that it raises."""
    try:
        return function()
    except (Exception, SystemExit) as exc:
        trace = exc.__traceback__
        while trace and trace.tb_frame.f_globals.get("__name__") == __name__:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(exc), exc, trace)).rstrip()
        raise UserCodeError(f"{who} raised an exception\n{text}") from exc
