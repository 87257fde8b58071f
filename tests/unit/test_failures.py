"""Failures of user code, from feeder to trainer."""

from __future__ import annotations

import asyncio
import io
import json
import os
import re
import subprocess
import sys
import threading
import traceback
import types
import zipfile
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, UnidentifiedImageError
from pydantic_core import PydanticCustomError

from dataloaderjob.core import errors, frames, ipc, supervision
from dataloaderjob.core.errors import (
    DataLoaderJobError,
    InputError,
    OutOfMemory,
    RemoteProtocolError,
    ServiceError,
    UnsupportedBatch,
    UserCodeError,
)
from dataloaderjob.core.texts import clean_lines
from dataloaderjob.core.ticket_codec import Ticket
from dataloaderjob.core.values import NotPlainError
from dataloaderjob.making.failures import MAX_TRACEBACK_NBYTES, _plain, pack_failure, unpack_failure
from dataloaderjob.making.fetcher import Fetcher, SampleError
from dataloaderjob.trainer.epochs.parts_iterator import _FailedError
from dataloaderjob.trainer.session.stream import SlotEndedError, SlotGoesOnError, StreamLeftError
from dataloaderjob.trainer.session.taking import failure_of

PUBLIC = [
    found
    for found in vars(errors).values()
    if isinstance(found, type) and issubclass(found, DataLoaderJobError)
]


class Simple(Exception):
    pass


class WithCode(Exception):
    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"code {code}: {detail}")
        self.code = code


class OwnText(Exception):
    def __str__(self) -> str:
        return f"{self.args[0]} and {self.args[1]}"


class KeywordOnly(Exception):
    def __init__(self, *, needed: object) -> None:
        super().__init__()
        self.needed = needed


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class Opaque:
    def __repr__(self) -> str:
        return "<what is missing>"


class Frozen(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


class Dataset:
    def __init__(self, error: Any) -> None:
        self.error = error

    def __getitem__(self, i: int) -> Any:
        raise self.error


def raised_by(error: BaseException, key: Any = 17) -> bytes:
    """What a feeder sends when a dataset raises `error`."""
    try:
        Fetcher(Dataset(error), None).fetch(0, Ticket(0, 0, False, [key]))
    except Exception as exc:
        return pack_failure(exc, feeder="feeder-0")
    raise AssertionError("it must raise")


def travelled(error: BaseException, key: Any = 17) -> BaseException:
    return unpack_failure(raised_by(error, key))


def answered(kind: ipc.Type, payload: bytes) -> ipc.Packet:
    """What arrives from the receiver in place of a batch."""
    assembler = ipc.Assembler()
    *_, whole = (assembler.feed(packet) for packet in ipc.pack(kind, payload))
    assert whole is not None
    return whole


def shown(error: BaseException) -> str:
    """What a traceback ends with."""
    return "".join(traceback.format_exception_only(error))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad value"),
        ValueError("two", "arguments"),
        IndexError(3),
        RuntimeError(),
        ZeroDivisionError("division by zero"),
        NotImplementedError("later"),
        AssertionError(),
        MemoryError("none left"),
        AttributeError("gone", name="x", obj=3),
        ImportError("gone", name="x"),
        Simple("own", object()),
        WithCode(5, "broken"),
        OSError("no number"),
        OwnText(1, 2),
    ],
    ids=lambda error: repr(error).split(" at 0x")[0],
)
def test_error_arrives_with_its_type_text_and_origin(error: Exception) -> None:
    found = travelled(error)
    assert type(found) is type(error)
    assert str(found) == str(error)
    (note,) = found.__notes__
    assert note.startswith("raised for index 17 in feeder-0:\nTraceback")
    assert "raise self.error" in note


def test_attributes_of_an_error_arrive() -> None:
    error = Simple("x")
    error.where, error.lock = ("file", 3), object()  # type: ignore[attr-defined]
    found: Any = travelled(error)
    assert found.where == ("file", 3)
    assert not hasattr(found, "lock")
    code: Any = travelled(WithCode(5, "broken"))
    assert code.code == 5


def test_a_key_error_prints_readably() -> None:
    found = travelled(KeyError("missing"))
    assert type(found) is KeyError
    assert found.args == ("missing",)
    assert shown(found).startswith("KeyError: 'missing'\nraised for index 17 in feeder-0:\nTraceback")


def test_argument_that_cannot_travel_leaves_type_and_text() -> None:
    found = travelled(KeyError(Opaque()))
    assert type(found) is KeyError
    assert found.__notes__[0].startswith("<what is missing>\n\nraised for index 17")


def test_an_os_error_keeps_its_number() -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open("/not/there")  # noqa: SIM115
    found = travelled(caught.value)
    assert type(found) is FileNotFoundError
    assert found.errno == 2
    assert (str(found), found.filename) == (str(caught.value), "/not/there")


def test_a_unicode_error_arrives() -> None:
    with pytest.raises(UnicodeDecodeError) as caught:
        b"\xff".decode()
    found = travelled(caught.value)
    assert type(found) is UnicodeDecodeError
    assert (str(found), found.object) == (str(caught.value), b"\xff")


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(PydanticCustomError("kind", "text"), id="laid-out-by-an-extension"),
        pytest.param(SystemExit(3), id="would-end-the-process"),
        pytest.param(type("Local", (Exception,), {"__module__": "not_there"})("text"), id="not-there"),
    ],
)
def test_error_that_cannot_be_rebuilt_arrives_as_user_code_error(error: BaseException) -> None:
    found = travelled(error)
    assert type(found) is UserCodeError
    assert type(error).__qualname__ in str(found)
    assert "raised for index 17 in feeder-0" in str(found)


@pytest.mark.parametrize("error", [KeywordOnly(needed=object()), Frozen("text")], ids=repr)
def test_error_arrives_without_its_constructor_and_without_setattr(error: Exception) -> None:
    found = travelled(error)
    assert (type(found), str(found)) == (type(error), str(error))
    assert found.__notes__[0].startswith("raised for index 17 in feeder-0:\nTraceback")


@pytest.mark.parametrize(
    "error",
    [
        pytest.param(json.JSONDecodeError("bad", "[,]", 1), id="made-of-other-arguments"),
        pytest.param(subprocess.CalledProcessError(3, ["x"], b"out"), id="text-of-its-attributes"),
        pytest.param(zipfile.BadZipFile("no zip"), id="plain"),
        pytest.param(UnidentifiedImageError("no image"), id="of-a-library"),
    ],
)
def test_error_of_a_library_arrives_with_its_text_and_attributes(error: Exception) -> None:
    found = travelled(error)
    assert (type(found), str(found), found.args) == (type(error), str(error), error.args)
    plain = {
        name: value for name, value in vars(error).items() if isinstance(value, int | str | bytes | list)
    }
    assert {name: vars(found).get(name) for name in plain} == plain


def test_error_that_forbids_attributes_arrives_with_its_note() -> None:
    found = travelled(Frozen("text"))
    assert (type(found), str(found)) == (Frozen, "text")
    assert "raised for index 17" in found.__notes__[0]


class Acting(Exception):
    """Would act on what a feeder gives it."""

    ran: ClassVar[list[str]] = []

    def __new__(cls, *args: Any) -> Any:
        cls.ran.append("__new__")
        return super().__new__(cls, *args)

    def __init__(self, *args: Any) -> None:
        self.ran.append("__init__")
        super().__init__(*args)

    def __setstate__(self, state: Any) -> None:
        self.ran.append("__setstate__")

    @property
    def where(self) -> str:
        return "here"

    @where.setter
    def where(self, value: str) -> None:
        self.ran.append("setter")


class OwnThread(threading.Thread, Exception):
    """More than an error."""


def test_an_error_is_made_without_code_of_its_class() -> None:
    forged = json.loads(raised_by(ValueError("text", 1)))
    forged |= {
        "type": [__name__, "Acting"],
        "text": "('text', 1)",
        "attributes": _plain({"where": 1, "more": 2, "args": (3,)}),
    }
    found: Any = unpack_failure(json.dumps(forged).encode())
    assert (type(found), found.args, found.more, found.where, Acting.ran) == (Acting, (3,), 2, "here", [])


@pytest.mark.parametrize(
    "name",
    [
        ("urllib.error", "HTTPError"),
        ("subprocess", "Popen"),
        (__name__, "OwnThread"),
        ("xml.sax.expatreader", "X"),
    ],
    ids=".".join,
)
def test_a_class_that_is_more_than_an_error_is_not_made(name: tuple[str, str]) -> None:
    __import__(name[0].partition(".")[0])
    loaded = set(sys.modules)
    forged = json.loads(raised_by(ValueError("text"))) | {"type": name}
    assert type(unpack_failure(json.dumps(forged).encode())) is UserCodeError
    assert set(sys.modules) == loaded, "and nothing is imported for it"


class NoMore(StopIteration):
    """The user's own end of a loop."""


class Cancelled(Exception, GeneratorExit):
    """Is caught as an error, and ends a generator."""


class OfOurs(SlotEndedError):
    """Extends an internal class of the package."""


@pytest.mark.parametrize(
    "error", [StopIteration("no more"), NoMore("no more"), StopAsyncIteration("no more")], ids=repr
)
def test_users_stop_iteration_in_a_feeder_arrives_as_a_runtime_error(error: Exception) -> None:
    found = travelled(error)
    assert (type(found), str(found)) == (RuntimeError, f"__getitem__ raised {type(error).__name__}: no more")
    assert re.match(r"raised for index 17 in feeder-0:\n(?s:.)*, in __getitem__", found.__notes__[0])
    assert "fetcher.py" not in shown(found), "our own frames are no help"


@pytest.mark.parametrize(
    "cls",
    [
        StopIteration, StopAsyncIteration, NoMore, GeneratorExit, KeyboardInterrupt, SystemExit, asyncio.CancelledError,
        Cancelled, SlotEndedError, SlotGoesOnError, StreamLeftError, OfOurs, _FailedError, SampleError, NotPlainError,
    ],
    ids=lambda cls: cls.__qualname__,
)  # fmt: skip
def test_class_that_would_end_a_loop_or_is_internal_is_not_made(cls: type[BaseException]) -> None:
    attributes = _plain({"batches": 0, "cause": 0, "value": 0})
    forged = json.loads(raised_by(ValueError())) | {
        "type": [cls.__module__, cls.__qualname__], "args": _plain((0,)), "text": "0", "attributes": attributes,
    }  # fmt: skip
    found = failure_of(answered(ipc.Type.FAILED, json.dumps(forged).encode()))
    assert type(found) is UserCodeError
    assert str(found).startswith(f"{cls.__qualname__}: 0" if cls.__module__ == "builtins" else cls.__module__)


@pytest.mark.parametrize("cls", [*PUBLIC], ids=lambda cls: cls.__name__)
def test_public_error_of_this_package_keeps_its_class(cls: type[Exception]) -> None:
    assert type(travelled(cls("text"))) is cls


@pytest.mark.parametrize(
    ("fails", "hinted"),
    [
        pytest.param(lambda: np.float, True, id="a-library-lacks-what-was-patched-in"),
        pytest.param(lambda: Image.open(io.BytesIO(b"heif")), True, id="a-format-that-was-registered"),
        pytest.param(lambda: undefined, True, id="a-name"),  # noqa: F821
        pytest.param(lambda: "".gone, False, id="an-attribute-of-an-object"),  # type: ignore[attr-defined]
        pytest.param(lambda: os.stat("/not/there"), False, id="a-file-that-is-not-there"),
        pytest.param(lambda: {}["a"], False, id="a-key"),
    ],
)
def test_error_due_to_missing_setup_has_a_hint(fails: Any, hinted: bool) -> None:
    with pytest.raises(Exception) as caught:
        fails()
    found = travelled(caught.value)
    assert type(found) is type(caught.value)
    assert str(found) == str(caught.value)
    assert ("worker_init_fn, or at the top of the dataset's module, as well." in shown(found)) is hinted


def test_a_class_of_the_user_is_found_among_loaded_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("shipped")
    module.Odd = type("Odd", (Exception,), {"__module__": "shipped"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "shipped", module)
    assert type(travelled(module.Odd("text"))) is module.Odd


def test_type_name_that_is_no_exception_is_not_called() -> None:
    forged = json.loads(raised_by(ValueError("x")))
    forged["type"] = ["os", "abort"]
    assert type(unpack_failure(json.dumps(forged).encode())) is UserCodeError
    forged["type"] = ["builtins", "int"]
    assert type(unpack_failure(json.dumps(forged).encode())) is UserCodeError


def test_error_with_a_failing_text_does_not_stop_the_report() -> None:
    found = travelled(BadText())
    assert isinstance(found, BadText | UserCodeError)
    assert any("raised for index 17" in note for note in found.__notes__)


def test_the_traceback_begins_in_the_user_s_code() -> None:
    text = shown(travelled(ValueError("x")))
    assert "fetcher.py" not in text
    assert "test_failures.py" in text


def test_a_chain_of_errors_arrives_as_text() -> None:
    try:
        try:
            raise KeyError("first")
        except KeyError as exc:
            raise ValueError("second") from exc
    except ValueError as exc:
        text = shown(travelled(exc))
    assert "KeyError: 'first'" in text
    assert "direct cause" in text


def test_long_tracebacks_and_texts_keep_their_beginning_and_end() -> None:
    packed = raised_by(ValueError("begin" + "é" * 200_000 + "end"))
    assert len(json.loads(packed)["traceback"].encode()) < MAX_TRACEBACK_NBYTES + 100
    found = unpack_failure(packed)
    for text in str(found), shown(found).removeprefix("ValueError: ").rstrip():
        assert text.startswith("begin")
        assert "bytes omitted" in text
        assert text.endswith("end")


def test_lone_surrogates_do_not_stop_the_report() -> None:
    found = travelled(ValueError("\udc80"))
    assert str(found) == "\udc80"
    assert "\\udc80" in found.__notes__[0]


def test_an_error_in_collate_fn_names_it() -> None:
    def collate(batch: Any) -> Any:
        raise TypeError("ragged")

    with pytest.raises(Exception, match="collate_fn") as caught:
        Fetcher([1, 2], collate).fetch(0, Ticket(0, 0, False, [0]))
    found = unpack_failure(pack_failure(caught.value, feeder="feeder-3"))
    assert shown(found).startswith("TypeError: ragged\nraised by collate_fn in feeder-3:\nTraceback")


def test_keys_that_are_not_numbers_are_shown() -> None:
    assert "raised for index ('a', 1) in feeder-0" in shown(travelled(ValueError("x"), ("a", 1)))


def test_error_of_this_package_arrives_without_a_traceback() -> None:
    found = unpack_failure(pack_failure(UnsupportedBatch("this leaf"), phase="encode", feeder="feeder-0"))
    assert type(found) is UnsupportedBatch
    assert (str(found), found.__notes__) == ("this leaf", ["raised by encode in feeder-0"])


@pytest.mark.parametrize(
    "name",
    ["first_line", "annotations", "__builtins__", "SystemExit", "colorsys.rgb_to_hls", ""],
    ids=repr,
)
def test_unknown_service_failure_becomes_a_plain_service_error(name: str) -> None:
    loaded = set(sys.modules)
    for kind in (ipc.Type.GIVEN_UP, ipc.Type.FAILED):
        found = failure_of(answered(kind, supervision.pack_failure(name, "no room")))
        assert (type(found), str(found)) == (ServiceError, "no room")
    assert set(sys.modules) == loaded


@pytest.mark.parametrize("cls", [*PUBLIC], ids=lambda cls: cls.__name__)
def test_feeder_names_its_own_errors_and_none_of_the_receivers(cls: type[Exception]) -> None:
    payload = supervision.pack_failure(cls.__name__, "\x1b[2Jno\nroom")
    own, feeders = (failure_of(answered(kind, payload)) for kind in (ipc.Type.GIVEN_UP, ipc.Type.FAILED))
    assert (type(own), str(own)) == (cls, "no\nroom")
    assert type(feeders) is (cls if cls in (ServiceError, OutOfMemory, InputError) else ServiceError)
    assert str(feeders) == "no\nroom"


def test_only_the_receiver_says_that_a_slot_has_ended() -> None:
    found = failure_of(answered(ipc.Type.ENDED, frames.pack_end(7)))
    assert (type(found), found.args) == (SlotEndedError, (7,))
    for payload in (frames.pack_end(7), frames.pack_there(7)):
        assert type(failure_of(answered(ipc.Type.FAILED, payload))) is RemoteProtocolError


ODD = {
    "empty": b"", "no-json": b"\xff\xfe", "number": b"7", "null": b"null", "text": b'"service"', "deep": b"[" * 100_000,
    "list": b'["service", "ended"]', "service-alone": b'{"service": "ServiceError"}',
    "service-of-a-list": b'{"service": ["ServiceError"], "message": ""}',
    "message-of-a-dict": b'{"service": "InputError", "message": {"a": 1}}', "infinite-end": b'{"ended": 1e999}',
    "end-of-a-bool": b'{"ended": true}', "text-of-an-end": b'{"ended": "7"}', "negative-end": b'{"ended": -1}',
    "large-end": b'{"ended": 18446744073709551616}', "long-number": b'{"ended": ' + b"9" * 5000 + b"}",
    "type-of-a-number": b'{"type": 1}',
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [ipc.Type.FAILED, ipc.Type.GIVEN_UP, ipc.Type.ENDED], ids=lambda kind: kind.name
)
@pytest.mark.parametrize("odd", ODD)
def test_odd_answer_in_place_of_a_batch_is_a_protocol_error(kind: ipc.Type, odd: str) -> None:
    assert type(failure_of(answered(kind, ODD[odd]))) is RemoteProtocolError


@given(st.text() | st.binary().map(repr), st.text())
def test_any_text_arrives(text: str, feeder: str) -> None:
    found = unpack_failure(pack_failure(ValueError(text), feeder=feeder))
    assert str(found) == clean_lines(text, MAX_TRACEBACK_NBYTES) or len(text) > 1000


class Coloured(Exception):
    """Shows an attribute, in a colour that is its own."""

    def __str__(self) -> str:
        return f"\x1b[31m{self.where}: {', '.join(self.args[0])}\x1b[0m"


DIRTY = "\x1b]0;owned\x07\x1b[2Jno\rfile\u202e"


@pytest.mark.parametrize(
    "error",
    [ValueError(DIRTY), OSError(2, DIRTY, DIRTY), RuntimeError([DIRTY], DIRTY), UnicodeError(DIRTY)],
    ids=lambda error: type(error).__name__,
)
def test_control_characters_of_an_exception_do_not_reach_a_terminal(error: Exception) -> None:
    found = unpack_failure(pack_failure(error, feeder="feeder-0"))
    assert type(found) is type(error)
    for shown in ("".join(traceback.format_exception(found)), str(found)):
        assert shown == clean_lines(shown, 100_000)
        assert "no" in shown


def test_exception_that_shows_no_control_characters_keeps_its_values() -> None:
    found = unpack_failure(pack_failure(KeyError(DIRTY)))
    assert (type(found), found.args) == (KeyError, (DIRTY,))


def test_exception_with_colours_of_its_own_gets_clean_values() -> None:
    error = Coloured(["a", DIRTY])
    error.where = DIRTY  # type: ignore[attr-defined]
    found = unpack_failure(pack_failure(error))
    assert type(found) is Coloured
    assert str(found).startswith("\x1b[31mno\nfile")
    assert DIRTY not in str(found)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"type": 5}', b"\xff", b'{"type": ["a"]}'], ids=repr)
def test_malformed_failure_is_refused(data: bytes) -> None:
    with pytest.raises(RemoteProtocolError):
        unpack_failure(data)
