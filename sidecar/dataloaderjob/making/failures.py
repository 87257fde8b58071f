"""Failures of user code as bytes, sent from the feeder to the trainer, which raises them again.

The format is JSON. The exception's arguments and attributes are sent only as plain values, never pickled.

The trainer does not trust feeders. The class of an exception is therefore looked up only in imported modules, without
running any code. The built-in class that this class extends creates the exception, so neither the class's own
constructor nor its properties run. The class's own `__str__` runs, as it does in any traceback.
"""

from __future__ import annotations

import base64
import builtins
import contextlib
import json
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from dataloaderjob.batches import allowed
from dataloaderjob.core import errors, supervision, values
from dataloaderjob.core.errors import DataLoaderJobError, InputError, RemoteProtocolError, UserCodeError
from dataloaderjob.core.layout import ClassName
from dataloaderjob.core.texts import clean, clean_lines
from dataloaderjob.making.fetcher import SAMPLE, SampleError
from dataloaderjob.shipping.modules import is_ours

MAX_TRACEBACK_NBYTES = 48 * 1024
_MAX_TEXT_NBYTES = 16 * 1024
_MAX_VALUES_NBYTES = 16 * 1024

_HINT = (
    "If the script sets a library's option, patches the library or registers something with it at startup, "
    "a feeder may not have run those lines. Run them in worker_init_fn, or at the top of the dataset's "
    "module, as well."
)


def pack_failure(exc: BaseException, *, phase: str = "", feeder: str = "") -> bytes:
    """Describes an exception for another process. A SampleError is described by its cause and, if known, the sample.

    `phase` names the user's function that ran, unless a SampleError names it.
    """
    position, key = None, None
    if isinstance(exc, SampleError):
        position, key, phase, exc = exc.position, exc.key, phase or exc.phase, exc.cause
    args, own = _args_and_attributes(exc)
    plain = {name: value for name, value in own.items() if _plain(value)}
    body = {
        "type": [type(exc).__module__, type(exc).__qualname__],
        "text": _text(exc),
        "args": _plain(args),
        "attributes": _plain(plain),
        "traceback": _traceback(exc) + (f"\n{_HINT}" if _may_lack_set_up(exc) else ""),
        "position": position,
        "key": None if key is None and (position is None or phase != SAMPLE) else _cut(_repr(key), 256),
        "phase": phase,
        "feeder": feeder,
    }
    return json.dumps(body).encode()


def unpack_failure(data: bytes | memoryview) -> Exception:
    """Rebuilds the exception, so that the caller can raise it.

    If this process can build the exception, its note contains the origin and the feeder's traceback. Otherwise, the
    result is a UserCodeError with all of that in its text. An error of the feeder itself (`supervision.pack_failure`)
    becomes an error of this package. Raises RemoteProtocolError if `data` is not a failure.
    """
    record = _parse(data)
    if isinstance(record, DataLoaderJobError):
        return record
    cls = _exception_class(*record.name)
    made = _rebuild(cls, record) if cls else None
    if made is not None:
        return made
    module, qualname = record.name
    shown = qualname if module == "builtins" else f"{module}.{qualname}"
    return UserCodeError(f"{shown}: {clean_lines(record.text, MAX_TRACEBACK_NBYTES)}\n\n{record.details}")


# Packing


def _args_and_attributes(exc: BaseException) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments and attributes that pickle would use for the built-in class. An OSError's file name, for
    example, is neither in args nor in __dict__."""
    args, own = exc.args, exc.__dict__
    with contextlib.suppress(Exception):
        reduced: Any = _builtin_base(type(exc)).__reduce__(exc)
        args, own = tuple(reduced[1]), {**dict(*reduced[2:]), **own}
    return args, {name: value for name, value in own.items() if _may_be_set(name)}


def _text(exc: BaseException) -> str:
    """Returns str() of the exception, shortened."""
    try:
        text = str(exc)
    except Exception:  # user code
        text = f"<{type(exc).__name__} whose __str__ fails>"
    return _cut(text, _MAX_TEXT_NBYTES)


def _repr(key: Any) -> str:
    try:
        return repr(key)
    except Exception:  # user code
        return f"<{type(key).__name__}>"


def _cut(text: str, nbytes: int) -> str:
    """Keeps the beginning and the end of a long text. Escapes lone surrogates, because JSON may not contain them."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) <= nbytes:
        return data.decode()
    head, tail = data[: nbytes // 4], data[-nbytes // 2 :]
    left_out = len(data) - len(head) - len(tail)
    return (
        f"{head.decode(errors='ignore')}\n[... {left_out} bytes omitted ...]\n{tail.decode(errors='ignore')}"
    )


def _plain(value: Any) -> str | None:
    try:
        data = values.pack(value)
    except values.NotPlainError:
        return None
    return base64.b64encode(data).decode() if len(data) <= _MAX_VALUES_NBYTES else None


def _traceback(exc: BaseException) -> str:
    """Formats the traceback without our own frames before the user's. Returns an empty string for this package's own
    errors."""
    if isinstance(exc, DataLoaderJobError):
        return ""
    try:
        lines = traceback.format_exception(type(exc), exc, _users_part(exc.__traceback__))
    except Exception as failed:  # a __str__ or __repr__ of user code somewhere in the chain
        lines = [f"(the traceback cannot be formatted: {type(failed).__name__})"]
    return _cut("".join(lines), MAX_TRACEBACK_NBYTES)


def _may_lack_set_up(exc: BaseException) -> bool:
    """Returns True if the error may be due to a library that only the script has set up, such as a missing
    `np.float`."""
    if isinstance(exc, DataLoaderJobError):
        return False
    if isinstance(exc, AttributeError):
        # numpy's __getattr__ raises its own.
        return isinstance(exc.obj, ModuleType) or _text(exc).startswith("module '")
    if isinstance(exc, OSError):
        return exc.errno is None  # raised by a library such as PIL or h5py, not by the system
    if isinstance(exc, LookupError):
        return not isinstance(exc, KeyError | IndexError)  # a codec, or a codec's error handler
    if isinstance(exc, NameError):
        return not isinstance(exc, UnboundLocalError)
    return isinstance(exc, pickle.UnpicklingError)


_ENDS_A_LOOP = (StopIteration, StopAsyncIteration)
_OURS = ("dataloaderjob.making.", "dataloaderjob.shipping.", "dataloaderjob.batches.")


def _users_part(tb: TracebackType | None) -> TracebackType | None:
    rest = tb
    while rest is not None and str(rest.tb_frame.f_globals.get("__name__", "")).startswith(_OURS):
        rest = rest.tb_next
    return rest or tb


# Rebuilding


@dataclass(frozen=True, slots=True, kw_only=True)
class _Record:
    """The contents of a packed failure."""

    name: ClassName
    text: str
    details: str
    """Origin of the exception, and the traceback."""
    args: tuple[Any, ...] | None
    """The exception's arguments, or None if not all of them are plain values."""
    attributes: dict[str, Any]
    """Attributes that are plain values."""


def _parse(data: bytes | memoryview) -> _Record | DataLoaderJobError:
    try:
        body = json.loads(bytes(data))
        if "service" in body:
            return supervision.unpack_failure(data, supervision.FEEDERS_ERRORS)
        module, qualname = map(str, body["type"])
        trace = clean_lines(body["traceback"], MAX_TRACEBACK_NBYTES)
        args, attributes = _unplain(body["args"]), _unplain(body["attributes"])
        return _Record(
            name=(module, qualname),
            text=str(body["text"]),
            details=f"raised {_where(body)}{':' if trace else ''}\n{trace}".rstrip(),
            args=args if type(args) is tuple else None,
            attributes=attributes if type(attributes) is dict else {},
        )
    except (ValueError, LookupError, TypeError, RecursionError) as exc:
        raise RemoteProtocolError(f"a failure cannot be read: {exc}") from exc


def _where(body: Mapping[str, Any]) -> str:
    if body["key"] is not None:
        what = [f"for index {body['key']}"]
    else:
        what = [f"by {body['phase']}"] if body["phase"] else []
    return (
        clean(" ".join(what + ([f"in {body['feeder']}"] if body["feeder"] else [])), 1000)
        or "in another process"
    )


def _unplain(data: str | None) -> Any:
    return None if data is None else values.unpack(base64.b64decode(data))


_TYPE_BASE: Any = vars(type)["__base__"]
_EXCEPTION_DICT: Any = vars(BaseException)["__dict__"]
"""Descriptors that read attributes of classes and exceptions without running their own code."""


def _exception_class(module: str, qualname: str) -> type[Exception] | None:
    """Returns the class if this process has imported it, and if its objects are errors and nothing else."""
    try:
        cls = allowed.find(module, qualname)
    except InputError:
        return None
    bases = allowed.mro(cls)
    if Exception not in bases or allowed.static(cls, "__del__") is not None:
        return None
    return cls if all(map(_may_be_base, bases)) else None


def _may_be_base(cls: type) -> bool:
    """Returns True if exceptions that extend this class are only errors. Such an exception cannot end the trainer's
    process or its loop, and does not control this package."""
    bases = allowed.mro(cls)
    if BaseException not in bases:
        return allowed.is_abstract_or_users(cls)
    if any(cls is one for one in _ENDS_A_LOOP):
        return False
    module, _, name = allowed.full_name(cls).rpartition(".")
    if is_ours(module) and vars(errors).get(name) is not cls:
        return False  # such as the internal end of a slot
    # A SystemExit or KeyboardInterrupt in a feeder must not end this process.
    return Exception in bases or cls is BaseException


def _builtin_base(cls: type[BaseException]) -> Any:
    """Returns the built-in exception class whose memory layout `cls` extends."""
    base: Any = cls
    while vars(builtins).get(base.__name__) is not base:
        base = _TYPE_BASE.__get__(base)
    return base


def _may_be_set(name: object) -> bool:
    return type(name) is str and not name.startswith("__")


def _set(exc: Exception, base: type, name: str, value: Any) -> None:
    """Sets an attribute as the built-in class does: no property or __setattr__ of the user's class runs."""
    slot: Any = next((vars(one)[name] for one in base.__mro__ if name in vars(one)), None)
    if hasattr(slot, "__set__"):
        slot.__set__(exc, value)
    else:
        _EXCEPTION_DICT.__get__(exc)[name] = value


def _cleaned(value: Any) -> Any:
    """Cleans the texts in plain values, because an exception may show them as they are."""
    if type(value) is str:
        return clean_lines(value, MAX_TRACEBACK_NBYTES)
    if type(value) in (tuple, list):
        return type(value)(map(_cleaned, value))
    if type(value) is dict:
        return {key: _cleaned(item) for key, item in value.items()}
    return value


def _rebuild(cls: type[Exception], record: _Record) -> Exception | None:
    """Returns an exception of `cls` with its note, or None if it cannot be built."""
    base = _builtin_base(cls)
    text = clean_lines(record.text, MAX_TRACEBACK_NBYTES)
    for args, attributes, is_clean in (
        (record.args, record.attributes, False),
        (_cleaned(record.args), _cleaned(record.attributes), True),
        ((text,), _cleaned(record.attributes), True),
    ):
        if args is None:
            continue
        with contextlib.suppress(Exception):
            made: Exception = base.__new__(cls, *args)
            base.__init__(made, *args)
            for name, value in attributes.items():
                if _may_be_set(name):
                    _set(made, base, name, value)
            shown = _text(made)
            if not is_clean and shown != clean_lines(shown, MAX_TRACEBACK_NBYTES):
                continue  # it would change the terminal that shows it
            same = shown in (record.text, text)
            if same or args == (text,):
                note = record.details if same else f"{text}\n\n{record.details}"
                _EXCEPTION_DICT.__get__(made)["__notes__"] = [note]
                return made
    return None
