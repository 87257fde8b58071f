"""The link between a supervisor and a provider in another process, which may be in the hands of an attacker."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_provider import FakeProvider
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from rig import until

from dataloaderjob.core.errors import InputError, RemoteProtocolError, ServiceError
from dataloaderjob.core.settings import SupervisorSettings
from dataloaderjob.core.supervision import EXIT_RAY_LOST, MAX_FEEDERS, Cause
from dataloaderjob.providers import link
from dataloaderjob.providers.provider import ProviderLost, Why
from dataloaderjob.providers.ray import agent
from dataloaderjob.providers.remote import RemoteProvider

OWN_KEY = "0f" * 32
HELLO = link.pack({"session": "s", "in_force": {"version": "2.60.0"}})
CALLS: dict[str, Callable[[RemoteProvider], object]] = {
    "found": lambda remote: remote.found(),
    "place": lambda remote: remote.place(1, 2, OWN_KEY),
    "kill": lambda remote: remote.kill(1),
    "late": lambda remote: remote.late([1, 2], taken=0, now=0.0),
    "memory": lambda remote: remote.out_of_memory(),
}
MOST_MEMORY_NBYTES = 64 * 1024**2


def settings(path: Path | None, **more: Any) -> SupervisorSettings:
    return SupervisorSettings(
        job="j", key_path="k", blob_folder="b", state_path="s", port=1, feeder_blob_folder="b",
        provider="remote", provider_socket=None if path is None else str(path), **more,
    )  # fmt: skip


@contextlib.contextmanager
def answering(answer: Callable[[socket.socket], None], **more: Any) -> Iterator[RemoteProvider]:
    """A supervisor's provider whose other end says hello, and then answers the next request in this way."""
    with tempfile.TemporaryDirectory() as folder, agent.listen(path := Path(folder) / "ray") as listener:

        def serve() -> None:
            sock, _ = listener.accept()
            with sock, contextlib.suppress(OSError):
                sock.recv(4096)
                sock.sendall(HELLO)
                sock.recv(1 << 20)
                answer(sock)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        remote = RemoteProvider(settings(path), gone=lambda _: None, **more)
        remote.connect()
        yield remote
        thread.join(10)
        assert not thread.is_alive()


def hang_up(remote: RemoteProvider) -> None:
    remote._sock.shutdown(socket.SHUT_RDWR)  # type: ignore[union-attr]


def ends_well(call: Callable[[RemoteProvider], object], data: bytes) -> None:
    """The call ends with a result or a declared error, whatever comes."""
    expected = contextlib.suppress(ServiceError, ProviderLost)
    with answering(lambda sock: sock.sendall(data), answer_s=5.0) as remote, expected:
        call(remote)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
)
ANSWERS = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(("found", "late", "memory", "more", "done", "error", "session", "in_force"), JSON),
)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@examples(max_examples=30)
@given(
    data=st.binary(max_size=200)
    | st.lists(ANSWERS, max_size=3).map(lambda all_: b"".join(map(link.pack, all_)))
)
def test_any_answer_ends_in_a_result_or_a_declared_error(call, data: bytes):
    ends_well(call, data)


@pytest.mark.parametrize(
    "filling", ["[" * 400_000, "{}," * 150_000, "[]," * 150_000, "0," * 250_000, '"a",' * 120_000, "9" * 400_000],
    ids=["deep", "objects", "lists", "numbers", "texts", "digits"],
)  # fmt: skip
@pytest.mark.parametrize(
    "call", [CALLS["found"], CALLS["late"], CALLS["memory"]], ids=["found", "late", "memory"]
)
def test_large_answer_is_refused_within_bounded_memory(call, filling: str):
    for text in (
        f'{{"found":[{filling}0]}}',
        f'{{"late":[{filling}0],"more":true}}',
        f'{{"memory":[{filling}0],"more":true}}',
    ):
        data = link.LENGTH.pack(len(text)) + text.encode()
        with answering(lambda sock, data=data: sock.sendall(data)) as remote:
            tracemalloc.start()
            with pytest.raises(ProviderLost):
                call(remote)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < MOST_MEMORY_NBYTES


def test_message_that_claims_to_be_too_large_is_refused_unread():
    head = link.LENGTH.pack(link.MAX_NBYTES + 1)
    refused = pytest.raises(ProviderLost, match=f"at most {link.MAX_NBYTES} bytes, but has")
    with answering(lambda sock: sock.sendall(head)) as remote, refused:
        remote.found()


def test_endless_parts_are_refused():
    def forever(sock: socket.socket) -> None:
        for number in range(100_000):
            sock.sendall(link.pack({"memory": [[f"host-{number}", "x"]], "more": True}))

    with answering(forever) as remote:
        with pytest.raises(ProviderLost, match=f"at most {link.MAX_HOSTS} nodes"):
            remote.out_of_memory()
        hang_up(remote)


def test_answer_that_trickles_in_is_given_up_at_the_deadline():
    def trickle(sock: socket.socket) -> None:
        for byte in HELLO * 100:
            sock.sendall(bytes([byte]))
            time.sleep(0.02)

    with answering(trickle, answer_s=0.3) as remote:
        began = time.monotonic()
        with pytest.raises(ProviderLost):
            remote.found()
        assert time.monotonic() - began < 5.0
        hang_up(remote)


@pytest.mark.parametrize(
    ("call", "answer", "error"),
    [
        ("found", {"found": [-1]}, "found must be a whole number from 0"),
        ("found", {"found": [0] * (MAX_FEEDERS + 1)}, "a list of at most 4096 numbers, but is list"),
        ("place", {"done": 1}, "done must be true, but is 1"),
        ("late", {"late": [[3, "FeederFails", "x", True, ""]], "more": False}, "a feeder that was asked for"),
        ("late", {"late": [[1, "Sabotage", "x", True, ""]], "more": False}, "a known cause, but is 'Sabotage'"),
        ("late", {"late": [[1, "FeederFails", "x" * 1001, True, ""]], "more": False}, "at most 1000 characters"),
        ("memory", {"memory": [["h"]], "more": False}, "entries of 2 values"),
        ("memory", {"memory": [], "more": True}, "true after a part with entries"),
    ],
    ids=["negative", "too-many", "not-done", "other-feeder", "cause", "text", "width", "empty-part"],
)  # fmt: skip
def test_odd_answer_is_refused_with_its_field(call: str, answer: dict[str, Any], error: str):
    refused = pytest.raises(ProviderLost, match=error)
    with answering(lambda sock: sock.sendall(link.pack(answer))) as remote, refused:
        CALLS[call](remote)


def test_error_of_the_other_side_is_a_clean_service_error():
    text = link.pack(link.error("no\x1b[31m room\nleft"))
    with (
        answering(lambda sock: sock.sendall(text)) as remote,
        pytest.raises(ServiceError, match=r"^no room left$"),
    ):
        remote.place(1, 1, OWN_KEY)


class Scripted(FakeProvider):
    """Reports these causes."""

    def __init__(self, whys: list[Why], killed: dict[str, str]) -> None:
        super().__init__()
        self.whys, self.killed = whys, killed

    def late(self, indices, *, taken, now) -> list[Why]:
        return [why for why in self.whys if why.feeder in indices]

    def out_of_memory(self) -> dict[str, str]:
        return self.killed


@contextlib.contextmanager
def served(provider: FakeProvider, **more: Any) -> Iterator[tuple[RemoteProvider, socket.socket]]:
    """A provider as the supervisor reaches it, and the listening socket."""
    with tempfile.TemporaryDirectory() as folder, agent.listen(path := Path(folder) / "ray") as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                agent.serve(provider, listener)

        threading.Thread(target=serve, daemon=True).start()
        remote = RemoteProvider(settings(path), **({"gone": lambda _: None} | more))
        remote.connect()
        yield remote, listener
        hang_up(remote)


PLAIN_TEXT = st.text("abc xyz.", max_size=30).map(lambda text: " ".join(text.split()))
WHYS = st.dictionaries(
    st.integers(0, MAX_FEEDERS - 1),
    st.tuples(st.sampled_from(Cause), PLAIN_TEXT, st.booleans(), PLAIN_TEXT),
    max_size=200,
).map(lambda found: [Why(index, *rest) for index, rest in found.items()])


@examples(max_examples=40)
@given(whys=WHYS, killed=st.dictionaries(PLAIN_TEXT.filter(bool), PLAIN_TEXT, max_size=200))
def test_causes_arrive_as_they_were_reported(whys: list[Why], killed: dict[str, str]):
    with served(Scripted(whys, killed)) as (remote, _):
        assert remote.late([why.feeder for why in whys], taken=3, now=0.0) == whys
        assert remote.out_of_memory() == killed


def test_feeders_come_and_go_through_the_link():
    provider = FakeProvider()
    with served(provider) as (remote, _):
        assert (remote.session, remote.in_force) == ("session", {})
        for index in (3, 0, 1):
            remote.place(index, 4, OWN_KEY)
        assert remote.found() == [0, 1, 3]
        assert provider.own_keys == {3: OWN_KEY, 0: OWN_KEY, 1: OWN_KEY}
        remote.kill(1)
        assert remote.found() == [0, 3]
        assert provider.kills == [1]


def test_long_texts_of_all_feeders_fit_the_messages():
    whys = [Why(index, Cause.FAILS, "\U0001f600" * 1500, True, "h" * 500) for index in range(MAX_FEEDERS)]
    with served(Scripted(whys, {f"h{n}": "x" * 5000 for n in range(5000)})) as (remote, _):
        found = remote.late(range(MAX_FEEDERS), taken=0, now=0.0)
        assert ([why.feeder for why in found], len(found[0].text)) == (
            list(range(MAX_FEEDERS)),
            link.MAX_TEXT,
        )
        assert len(remote.out_of_memory()) == link.MAX_HOSTS


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param({}, id="empty"),
        pytest.param({"ask": "scale"}, id="unknown"),
        pytest.param({"ask": "place"}, id="no-index"),
        pytest.param({"ask": "place", "index": -1, "feeders": 1}, id="negative"),
        pytest.param({"ask": "place", "index": 1, "feeders": 1, "key": "0f"}, id="short-key"),
        pytest.param({"ask": "place", "index": 1, "feeders": 1, "key": 7}, id="number-as-key"),
        pytest.param({"ask": "late", "indices": "all", "taken": 0}, id="not-a-list"),
    ],
)
def test_request_that_is_none_is_refused(request_: dict[str, Any]):
    with pytest.raises(RemoteProtocolError):
        list(agent.answers(FakeProvider(), request_))


def test_error_of_a_provider_reaches_the_supervisor():
    with served(FakeProvider(fails=ServiceError("Ray does not say"))) as (remote, _):
        with pytest.raises(ServiceError, match=r"^Ray does not say$"):
            remote.found()
        remote.place(1, 1, OWN_KEY)


def test_end_of_the_other_process_ends_an_idle_supervisor():
    codes: list[int] = []
    with answering(lambda sock: None) as remote:
        remote._gone = codes.append
        remote._sock.sendall(link.pack({"ask": "found"}))  # type: ignore[union-attr]
        until(lambda: codes == [EXIT_RAY_LOST], 10, "the watch sees it")


def test_supervisor_waits_for_the_socket_and_finally_gives_up(tmp_path: Path):
    remote = RemoteProvider(settings(tmp_path / "ray", init_timeout_s=0.3))
    with pytest.raises(ServiceError, match=r"Ray did not come up behind the socket .*/ray within 0 s"):
        remote.connect()
    with pytest.raises(InputError, match=r"must contain provider_socket, .*, but do not"):
        RemoteProvider(settings(None))


def test_stale_socket_of_an_earlier_agent_is_replaced(tmp_path: Path):
    agent.listen(tmp_path / "ray").close()
    with agent.listen(tmp_path / "ray"):
        assert (os.stat(tmp_path / "ray").st_mode & 0o777) == 0o660


def test_hello_names_only_the_settings_that_a_status_shows():
    found = link.hello(
        "s", {"version": "2.60.0", "secret": "x", "health_check_period_ms": 5, "gcs": object()}
    )
    assert json.loads(json.dumps(found)) == {
        "session": "s",
        "in_force": {"version": "2.60.0", "health_check_period_ms": 5},
    }
