"""The state on which user code depends, other than modules: the working directory, the environment, library settings.

The trainer captures this state, and a feeder applies it before it loads any user code. Scripts configure libraries at
their top level, and no object of the dataset holds these settings. Some libraries may not be loaded in a feeder, which
would have to import them to change their settings. Their settings are sent only if they differ from the defaults.
"""

from __future__ import annotations

import builtins
import contextlib
import csv
import decimal
import locale
import logging
import mimetypes
import os
import pickle
import re
import resource
import socket
import sys
import tempfile
import time
import warnings
from typing import Any

import numpy as np
import torch

from dataloaderjob.core.keep import keep_seconds
from dataloaderjob.core.places import LAUNCHERS, SOCKET_VARIABLE

_PIXELS = 1024 * 1024 * 1024 // 4 // 3
_IMPORTED_FOR_EFFECT = ("hdf5plugin", "pillow_avif", "pillow_heif", "pillow_jxl")
"""Libraries that register themselves with another library when they are imported."""
_DIALECT = (
    "delimiter", "doublequote", "escapechar", "lineterminator", "quotechar", "quoting", "skipinitialspace", "strict",
)  # fmt: skip
_TORCH_PRINTS: Any = torch._tensor_str.PRINT_OPTS  # noqa: SLF001  torch has no public access to it
_NEVER = re.compile(
    r"(?:\w+_)?RANK$|LOCAL_WORLD_SIZE|GROUP_WORLD_SIZE|ROLE_WORLD_SIZE|MASTER_(?:ADDR|PORT)|TORCHELASTIC_\w+|TORCH_NCCL_\w+|NCCL_\w+|"
    r"(?:OMPI|PMI|PMIX|SLURM|RAY|DATALOADERJOB|KUBERNETES|PYTHON|LD|CUDA|NVIDIA|JOB_COMPLETION|MALLOC)_\w+|"
    r"(?:HIP|ROCR|ZE)_\w+|PYTHON\w+|\w+_SERVICE_(?:HOST|PORT)\w*|\w+_PORT_\d+_\w+|\w+_PORT|"
    r"HOSTNAME|POD_\w+|_|PWD|OLDPWD|SHLVL|PYTEST_CURRENT_TEST|INVOCATION_ID|JOURNAL_STREAM"
)
"""Environment variables that belong to a rank or to a single process. They are not sent, because all ranks must have
the same bundle. `_OF_A_LAUNCHER` matches the exceptions, which are sent if the service is kept."""
_OWN = re.compile(
    r"HOME|USER|LOGNAME|SHELL|TERM\w*|TMPDIR|XDG_\w+|SSH_\w+|DISPLAY|COLUMNS|LINES|LS_COLORS|\w+_NUM_THREADS|COVERAGE_\w+"
)
"""Environment variables for which a feeder keeps its own value, unless the script has changed the value."""
_OF_A_LAUNCHER = re.compile(
    r"(?!\w*(?:RANK|PROCID|LOCALID|NODEID|GTIDS|TASK_PID|VPID|CPU_BIND\w*|_STEP\w*|_URI\w*|_PORT|_FD)$)"
    rf"(?:{LAUNCHERS})_\w+"
)
"""Environment variables that a launcher sets to the same value for all ranks of a node. A kept service is started
without them."""
_RANK_ARGUMENT = re.compile(r"--local[-_]rank=\d+")


def take() -> dict[str, Any]:
    return {
        "imports": [name for name in _IMPORTED_FOR_EFFECT if name in sys.modules],
        "pil": _pil(),
        "decimal": _decimal(),
        "csv": csv.field_size_limit(),
        "dialects": _dialects(),
        "tempdir": tempfile.tempdir,
        "flushes": _flushes_denormals(),
        "mime": _mime_types(),
        "socket": socket.getdefaulttimeout(),
        "unverified": _unverified(),
        "numpy": np.geterr(),
        "numpy prints": _plain(np.get_printoptions()),
        "torch prints": _plain(vars(_TORCH_PRINTS)),
    }


def _pil() -> dict[str, Any]:
    image, file = sys.modules.get("PIL.Image"), sys.modules.get("PIL.ImageFile")
    found: dict[str, Any] = {}
    if file is not None and getattr(file, "LOAD_TRUNCATED_IMAGES", False):
        found["truncated"] = True
    if image is not None and getattr(image, "MAX_IMAGE_PIXELS", _PIXELS) != _PIXELS:
        found["pixels"] = image.MAX_IMAGE_PIXELS
    return found


def _decimal() -> dict[str, Any]:
    context = decimal.getcontext()
    traps = [signal.__name__ for signal, trapped in context.traps.items() if trapped]
    return {"prec": context.prec, "rounding": context.rounding, "traps": traps}


def _unverified() -> bool:
    """Returns True if the script has disabled the verification of certificates, for example to download from an old
    server."""
    ssl = sys.modules.get("ssl")
    return ssl is not None and ssl._create_default_https_context is ssl._create_unverified_context  # noqa: SLF001


def _mime_types() -> dict[str, str]:
    """Returns all MIME types, because the table does not separate the script's types from the machine's. Returns an
    empty dict if the table was never used."""
    return dict(sorted(mimetypes.types_map.items())) if mimetypes.inited else {}


def _dialects() -> dict[str, dict[str, Any]]:
    """Returns the CSV dialects that the script has registered."""
    own = sorted(set(csv.list_dialects()) - {"excel", "excel-tab", "unix"})
    return {
        name: {attribute: getattr(csv.get_dialect(name), attribute) for attribute in _DIALECT} for name in own
    }


def _flushes_denormals() -> bool:
    """Returns True if the script has called torch.set_flush_denormal(True). torch has no getter for this setting, so it
    is measured."""
    return float(torch.tensor(1e-38) * torch.tensor(0.1)) == 0.0


def _plain(options: Any) -> dict[str, Any]:
    return {k: v for k, v in options.items() if isinstance(v, str | int | float)}


# In a feeder


def _apply_libraries(state: dict[str, Any]) -> None:
    for name in state["imports"]:
        try:
            __import__(name)
        except ImportError:
            continue  # code that needs the library will fail with an error
    _apply_pil(state["pil"])
    context = decimal.getcontext()
    context.prec, context.rounding = state["decimal"]["prec"], state["decimal"]["rounding"]
    for signal in context.traps:
        context.traps[signal] = signal.__name__ in state["decimal"]["traps"]
    csv.field_size_limit(state["csv"])
    for name, attributes in state["dialects"].items():
        csv.register_dialect(name, **attributes)
    if state["tempdir"] is not None and os.path.isdir(state["tempdir"]):
        tempfile.tempdir = state["tempdir"]
    if state["flushes"]:
        torch.set_flush_denormal(True)
    socket.setdefaulttimeout(state["socket"])
    if state["unverified"]:
        import ssl

        ssl._create_default_https_context = ssl._create_unverified_context  # type: ignore[assignment]  # noqa: SLF001
    for extension, kind in state["mime"].items():
        mimetypes.add_type(kind, extension)
    np.seterr(**state["numpy"])
    np.set_printoptions(**state["numpy prints"])
    vars(_TORCH_PRINTS).update(state["torch prints"])


def _apply_pil(pil: dict[str, Any]) -> None:
    if not pil:
        return
    try:
        from PIL import Image, ImageFile
    except ImportError:
        return
    if "truncated" in pil:
        ImageFile.LOAD_TRUNCATED_IMAGES = pil["truncated"]
    if "pixels" in pil:
        Image.MAX_IMAGE_PIXELS = pil["pixels"]


def _variables_at_start() -> dict[str, str]:
    try:
        with open("/proc/self/environ", "rb") as file:
            entries = file.read().split(b"\0")
    except OSError:
        return {}
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in (e.partition(b"=") for e in entries)}


class ProcessState:
    """The state of this process. It is packed again only if it has changed."""

    def __init__(self) -> None:
        self._at_start = _variables_at_start()
        self._last: tuple[Any, bytes] | None = None
        self._variables: tuple[Any, dict[str, str]] | None = None
        self._seen = {name for name in self._at_start if not _NEVER.fullmatch(name)}
        """Names of the environment variables that a feeder may have received from this process."""

    def packed(self) -> bytes:
        state = self._take()
        if self._last is None or self._last[0] != state:
            self._last = state, pickle.dumps(state, protocol=5)
        return self._last[1]

    def _take(self) -> dict[str, Any]:
        chosen = self._environ()
        return {
            "cwd": _cwd(),
            "path": [os.path.abspath(path) if path else path for path in sys.path if isinstance(path, str)],
            "argv": [argument for argument in sys.argv if not _RANK_ARGUMENT.fullmatch(argument)],
            "environ": chosen,
            "removed": sorted(name for name in self._seen if name not in os.environ),
            "zone": _zone(),
            "locale": locale.setlocale(locale.LC_ALL),
            "recursion": sys.getrecursionlimit(),
            "digits": sys.get_int_max_str_digits(),
            "umask": _umask(),
            "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            "logging": _logging(),
            "warnings": _filters(),
            "torch": _torch(),
            "libraries": take(),
        }

    def _environ(self) -> dict[str, str]:
        raw = os.environ._data  # type: ignore[attr-defined]  # noqa: SLF001  compared undecoded, at each iter()
        if self._variables is None or self._variables[0] != raw:
            self._variables = dict(raw), self._chosen()
        return self._variables[1]

    def _chosen(self) -> dict[str, str]:
        # Feeders that outlive a script may have another script's variables. Feeders of a job or a run do not.
        kept = not os.environ.get(SOCKET_VARIABLE) and keep_seconds() > 0

        def travels(name: str, value: str) -> bool:
            own = _OWN.fullmatch(name) and self._at_start.get(name) == value
            if kept:
                return not _NEVER.fullmatch(name) or bool(_OF_A_LAUNCHER.fullmatch(name))
            return not _NEVER.fullmatch(name) and not own

        found = {name: value for name, value in sorted(os.environ.items()) if travels(name, value)}
        self._seen.update(found)
        return found


def _umask() -> int | None:
    """Reads the umask without changing it, because other threads would notice a change."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as file:
            return next((int(line.split()[1], 8) for line in file if line.startswith("Umask:")), None)
    except OSError:
        return None


def _zone() -> tuple[Any, ...]:
    """Returns the time zone that is in effect. This may differ from TZ, if `time.tzset` was not called after TZ was
    set."""
    return time.tzname, time.timezone, time.altzone


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:
        return None


def _logging() -> dict[str, Any]:
    root = logging.getLogger()
    stream = [h for h in root.handlers if type(h) is logging.StreamHandler]
    # Only the format of a standard formatter is sent. A formatter of a user's class is left out.
    form: Any = stream[0].formatter if stream else None
    levels = {
        name: logger.level
        for name, logger in list(root.manager.loggerDict.items())
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {
        "level": root.level,
        "handler": bool(stream),
        "format": (form._fmt, form.datefmt) if type(form) is logging.Formatter else None,  # noqa: SLF001
        "levels": levels,
        "disabled": root.manager.disable,
    }


def _filters() -> list[tuple[Any, ...]]:
    """Returns the warning filters for built-in categories. A library adds filters for its own categories when it is
    imported."""
    found: list[tuple[Any, ...]] = []
    entries: list[Any] = list(warnings.filters)
    for action, message, category, module, line in entries:
        name = getattr(category, "__name__", "")
        if vars(builtins).get(name) is category:
            found.append((action, _text(message), name, _text(module), line))
    return found


def _text(pattern: Any) -> tuple[str, int] | None:
    if pattern is None:
        return None
    return (pattern, 0) if isinstance(pattern, str) else (pattern.pattern, pattern.flags)


def _torch() -> dict[str, Any]:
    return {
        "dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "grad": torch.is_grad_enabled(),
        "matmul": torch.get_float32_matmul_precision(),
        "autocast": (
            torch.is_autocast_enabled("cpu"),
            str(torch.get_autocast_dtype("cpu")).removeprefix("torch."),
        ),
    }


# In a feeder


def apply(packed: bytes) -> None:
    """Applies the trainer's state to this process. Ignores a working directory or a locale that does not exist on this
    machine."""
    state = pickle.loads(packed)  # noqa: S301  authenticated
    if state["cwd"] is not None and os.path.isdir(state["cwd"]):
        os.chdir(state["cwd"])
    sys.argv[:] = state["argv"]
    sys.path[:] = _merged(state["path"], sys.path)
    _apply_environ(state["environ"], state["removed"])
    if state["zone"] != _zone():
        time.tzset()
    with contextlib.suppress(locale.Error):
        locale.setlocale(locale.LC_ALL, state["locale"])
    sys.setrecursionlimit(max(state["recursion"], sys.getrecursionlimit()))
    sys.set_int_max_str_digits(state["digits"])
    if state["umask"] is not None:
        os.umask(state["umask"])
    _allow_files(state["files"])
    _apply_logging(state["logging"])
    _apply_filters(state["warnings"])
    _apply_torch(state["torch"])
    _apply_libraries(state["libraries"])


def _allow_files(wanted: int) -> None:
    """Increases this process's file descriptor limit to the trainer's, as far as permitted."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    endless = resource.RLIM_INFINITY
    wanted = wanted if hard == endless else hard if wanted == endless else min(wanted, hard)
    if soft != endless and (wanted == endless or wanted > soft):
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _apply_environ(theirs: dict[str, str], removed: list[str]) -> None:
    variables = dict(theirs)
    if "PATH" in variables:
        folders = [path.split(os.pathsep) for path in (variables["PATH"], os.environ.get("PATH", ""))]
        variables["PATH"] = os.pathsep.join(_merged(*folders))
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    for name in removed:
        os.environ.pop(name, None)


def _merged(theirs: list[str], ours: list[str]) -> list[str]:
    """Returns the trainer's entries that exist on this machine, in the trainer's order, followed by this process's
    other entries."""
    found = [path for path in theirs if not path or os.path.exists(path)]
    return found + [path for path in ours if path not in found]


def _apply_logging(state: dict[str, Any]) -> None:
    root = logging.getLogger()
    if state["handler"] and not root.handlers:
        form, date = state["format"] or (logging.BASIC_FORMAT, None)
        logging.basicConfig(format=form, datefmt=date)
    root.setLevel(state["level"])
    for name, level in state["levels"].items():
        logging.getLogger(name).setLevel(level)
    logging.disable(state["disabled"])


def _apply_filters(filters: list[tuple[Any, ...]]) -> None:
    categories = vars(builtins)
    made = []
    for action, message, category, module, line in filters:
        if category in categories:
            made.append((action, _pattern(message), categories[category], _pattern(module), line))
    entries: list[Any] = list(warnings.filters)
    others = [entry for entry in entries if categories.get(entry[2].__name__) is not entry[2]]
    warnings.filters[:] = made + others  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]  # noqa: SLF001  as filterwarnings does


def _pattern(text: tuple[str, int] | None) -> Any:
    return None if text is None else re.compile(*text)


def _apply_torch(state: dict[str, Any]) -> None:
    torch.set_default_dtype(getattr(torch, state["dtype"]))
    torch.set_grad_enabled(state["grad"])
    torch.set_float32_matmul_precision(state["matmul"])
    enabled, dtype = state["autocast"]
    torch.set_autocast_enabled("cpu", enabled)
    torch.set_autocast_dtype("cpu", getattr(torch, dtype))
    here = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    if (state["deterministic"], state["warn_only"]) != here:  # the call imports the compiler, which takes 2 s
        torch.use_deterministic_algorithms(state["deterministic"], warn_only=state["warn_only"])
