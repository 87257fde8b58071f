"""Inputs that fuzzing found: each once raised something that no caller expects."""

from __future__ import annotations

import base64
import importlib
import json
import sys
import types
from pathlib import Path
from typing import ClassVar, Self

import numpy as np
import pyarrow as pa
import pytest

from dataloaderjob.core import handshake, layout, settings, sockets, supervision, ticket_codec, values
from dataloaderjob.core.blobs import Bundle
from dataloaderjob.core.errors import AuthError, InputError, RemoteProtocolError, UserCodeError
from dataloaderjob.core.layout import NodeKind
from dataloaderjob.core.records import HEAD, MAGIC, ROW, Record
from dataloaderjob.core.settings import SidecarSettings
from dataloaderjob.local.mapping.messages import from_message, to_message
from dataloaderjob.making import failures
from dataloaderjob_operator.decide.supervisor_status import parse

KEY = bytes(32)
DEEP = "[" * 5000 + "]" * 5000
LEVELS = range(850, 1000)
"""Python reads JSON of this depth, or just does not, depending on the depth of the stack."""


def nested(levels: int) -> str:
    return "[" * levels + "]" * levels


def test_a_feeders_failure_of_any_depth_becomes_one_line():
    payload = f'{{"service": "FeederLost", "message": {DEEP}}}'.encode()
    assert supervision.describe_failure(payload)["reason"] == supervision.UNKNOWN


@pytest.mark.parametrize("place", ["type", "traceback", "attributes"])
def test_a_failure_nested_too_deeply_is_refused_in_the_trainer(place: str):
    body = json.loads(failures.pack_failure(ValueError("x")))
    payload = json.dumps({**body, place: "MARK"}).replace('"MARK"', DEEP).encode()
    with pytest.raises(RemoteProtocolError, match="a failure cannot be read"):
        failures.unpack_failure(payload)


def test_settings_nested_too_deeply_are_refused_by_name(tmp_path: Path):
    path = tmp_path / "settings.json"
    path.write_text(f'{{"job": {DEEP}}}')
    with pytest.raises(InputError, match=r"cannot read settings for SidecarSettings from .*settings\.json"):
        settings.load(SidecarSettings, path)


def message(text: str) -> bytes:
    data = text.encode()
    return sockets.LENGTH.pack(len(data)) + data


@pytest.mark.parametrize("field", ["nonce", "role", "facts", "mac"])
def test_a_stranger_ends_only_its_handshake_however_deep_its_answer(field: str):
    for levels in LEVELS:
        server = handshake.ServerHandshake(KEY, job="j")
        reply = {
            "nonce": "n",
            "protocol": handshake.CONTROL.newest,
            "role": "r",
            "name": "n",
            "job": "j",
            "facts": {},
            "mac": "m",
        }
        text = json.dumps({**reply, field: "MARK"}).replace('"MARK"', nested(levels))
        with pytest.raises((AuthError, RemoteProtocolError)):
            server.receive(message(text))


def test_a_stranger_that_answers_ends_only_the_connection_to_it():
    for levels in LEVELS:
        client = handshake.ClientHandshake(KEY, role="r", name="n", job="j")
        newest = handshake.CONTROL.newest
        text = f'{{"nonce": {nested(levels)}, "protocol": {newest}, "oldest": {newest}}}'
        try:
            client.receive(message(text))
        except RemoteProtocolError:
            continue
        assert not client.done


def test_a_bundles_manifest_of_any_depth_is_refused_or_read():
    manifest = Bundle(blobs=(("a" * 64, 1),)).manifest().decode()
    for levels in LEVELS:
        text = manifest.replace('"facts":{}', f'"facts":{{"a":{nested(levels)}}}')
        try:
            Bundle.parse(text.encode())
        except RemoteProtocolError:
            continue


def test_a_record_whose_row_points_beyond_any_file_is_refused(tmp_path: Path):
    rank = tmp_path / "rank-0"
    rank.mkdir()
    (rank / "1-2.rows").write_bytes(HEAD.pack(MAGIC) + ROW.pack(0, 0, 0, 0, 0, (1 << 64) - 1, 8, 0, 0))
    (rank / "1-2.tickets").write_bytes(bytes(64))
    (piece,) = Record.open(tmp_path).ranks["0"]
    (row,) = piece.rows()
    with pytest.raises(InputError, match="cannot be read at byte 18446744073709551615"):
        piece.ticket(row)


def test_a_ticket_that_claims_more_keys_than_it_has_is_refused():
    ticket = bytearray(ticket_codec.pack_ticket(1, 2, [3, 4]))
    ticket[20:24] = b"\xff" * 4
    with pytest.raises(RemoteProtocolError, match="4294967295 indices"):
        ticket_codec.ints_of(bytes(ticket))


@pytest.mark.parametrize("first", [({},), (), {}, 0, [0, 0]], ids=str)
def test_attributes_of_anything_but_an_object_are_refused(first: object):
    schema = values.pack((int(NodeKind.ATTRIBUTES), ("a",), (first, (int(NodeKind.VALUE), 0))))
    head = (0, 0, layout.MAGIC, layout.VERSION, 0, len(schema), layout.digest(schema))
    with pytest.raises(RemoteProtocolError, match="malformed"):
        layout.parse(layout.HEADER.pack(*head) + schema)


class Watched(Exception):
    """An exception whose code says when it runs."""

    ran: ClassVar[list[str]] = []

    def __new__(cls, *args: object) -> Self:
        cls.ran.append("new")
        return super().__new__(cls, *args)

    def __init__(self, *args: object) -> None:
        self.ran.append("init")
        super().__init__(*args)

    def __setattr__(self, name: str, value: object) -> None:
        self.ran.append(f"set {name}")

    def __setstate__(self, state: object) -> None:
        self.ran.append("setstate")

    @property
    def place(self) -> str:
        return "here"

    @place.setter
    def place(self, value: object) -> None:
        self.ran.append("property")


def forged(name: list[str], *args: object, **attributes: object) -> bytes:
    body = json.loads(failures.pack_failure(ValueError("x")))
    packed = {"args": args, "attributes": attributes}
    texts = {key: base64.b64encode(values.pack(value)).decode() for key, value in packed.items()}
    return json.dumps({**body, "type": name, **texts}).encode()


def test_a_feeders_failure_runs_no_constructor_and_no_property():
    Watched.ran.clear()
    found = failures.unpack_failure(forged([__name__, "Watched"], "x", place="there", other=3, __class__=5))
    assert Watched.ran == []
    assert type(found) is Watched
    assert (found.args, found.place, vars(found)["other"]) == (("x",), "here", 3)


@pytest.mark.parametrize(
    "name", ["xml.dom.xmlbuilder", "json.tool", "json.__main__", "json.tool.os", "no_module"]
)
def test_a_feeders_failure_imports_no_module(name: str):
    importlib.import_module("xml")  # the package of a submodule that nobody has imported
    loaded = set(sys.modules)
    assert type(failures.unpack_failure(forged([name, "Error"], "x"))) is UserCodeError
    assert set(sys.modules) == loaded


def test_a_feeders_failure_asks_no_module_for_a_name_that_it_makes(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []
    module = types.ModuleType("lazy")
    module.__getattr__ = asked.append  # type: ignore[method-assign]
    monkeypatch.setitem(sys.modules, "lazy", module)
    assert type(failures.unpack_failure(forged(["lazy", "Error"], "x"))) is UserCodeError
    assert asked == []


def test_results_whose_offsets_point_elsewhere_are_refused():
    batch = pa.record_batch({"index": [0, 1], "text": ["first", "second"]})
    offsets = np.array([0, 5, 11], np.int32).tobytes()
    wrong = np.array([0, 5, 1 << 30], np.int32).tobytes()
    message = to_message(batch).tobytes()
    assert message.count(offsets) == 1
    assert from_message(np.frombuffer(message, np.uint8)).equals(batch)
    with pytest.raises(RemoteProtocolError, match="not valid Arrow data"):
        from_message(np.frombuffer(message.replace(offsets, wrong), np.uint8))


def is_without_class(message: bytes) -> bool:
    """Returns True if pyarrow accepts the message, but has no class for its columns."""
    try:
        with pa.ipc.open_stream(message) as stream:
            batch = stream.read_next_batch()
            batch.validate(full=True)
            batch.to_pylist()
    except KeyError:
        return True
    except Exception:
        return False
    return False


@pytest.mark.parametrize("is_inside", [False, True], ids=["a column", "inside a list"])
def test_results_of_a_type_without_a_python_class_are_refused(is_inside: bool):
    """The unit of intervals, 2 (months, days and nanoseconds), is altered to 0 (months)."""
    intervals = pa.array([(1, 2, 3)] * 2, pa.month_day_nano_interval())
    column = pa.ListArray.from_arrays(pa.array([0, 1, 2], pa.int32()), intervals) if is_inside else intervals
    message = to_message(pa.record_batch({"x": column})).tobytes()
    altered = [message[:at] + b"\0" + message[at + 1 :] for at, byte in enumerate(message) if byte == 2]
    found = [one for one in altered if is_without_class(one)]
    assert found
    for one in found:
        with pytest.raises(RemoteProtocolError, match="not valid Arrow data"):
            from_message(np.frombuffer(one, np.uint8))


MANY = 1 << 23
NULLS = pa.nulls(MANY)
ONE_LIST = pa.array([0, MANY], pa.int32())


@pytest.mark.parametrize(
    "column",
    [
        pytest.param(NULLS, id="rows"),
        pytest.param(pa.ListArray.from_arrays(ONE_LIST, NULLS), id="a list"),
        pytest.param(pa.FixedSizeListArray.from_arrays(NULLS, MANY), id="a fixed list"),
        pytest.param(pa.StructArray.from_arrays([NULLS], ["a"]), id="a struct"),
        pytest.param(
            pa.ListArray.from_arrays(ONE_LIST, pa.RunEndEncodedArray.from_arrays([MANY], ["x"])), id="runs"
        ),
        pytest.param(
            pa.ListViewArray.from_arrays(pa.array([0] * 3000, pa.int32()), pa.array([3000] * 3000, pa.int32()),
                                         pa.nulls(3000)), id="views of one list",
        ),
        pytest.param(
            pa.ListArray.from_arrays(
                pa.array([0, 1], pa.int32()), pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), NULLS)
            ), id="a dictionary",
        ),
    ],
)  # fmt: skip
def test_results_of_far_more_elements_than_bytes_are_refused(column: pa.Array):
    message = to_message(pa.record_batch({"x": column}))
    assert message.nbytes < 100_000
    with pytest.raises(RemoteProtocolError, match=r"elements in [0-9]+ bytes; at most 4194304 are allowed"):
        from_message(message)


@pytest.mark.parametrize(
    "message", [b"", "text", None, np.zeros(0, np.uint8), np.zeros(64, np.uint8)], ids=repr
)
def test_results_that_are_no_message_are_refused(message: object):
    with pytest.raises(RemoteProtocolError, match="a feeder sent"):
        from_message(message)


@pytest.mark.parametrize("cause", [[], {}, ["OutOfMemory"]], ids=str)
def test_a_cause_that_is_no_text_is_reported_like_an_unknown_one(cause: object):
    feeders = [{"name": "feeder-0", "state": "backoff", "cause": cause, "why": "it fell"}]
    found = parse({"type": "status", "desired": 1, "ready": 0, "feeders": feeders}).cause
    assert found is not None
    assert (found.reason, found.text) == ("FeederFails", "feeder-0: it fell")
