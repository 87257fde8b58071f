"""A port under TLS, under strangers who begin TLS: peers with the key come first, and strangers cost little."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from flood import flooded
from generations import Generations
from hypothesis import given
from hypothesis import strategies as st
from patience import PATIENCE_S

from dataloaderjob.core import acceptor, keys, opening
from dataloaderjob.core.acceptor import MAX_UNPROVEN, SHARE, Acceptor
from dataloaderjob.core.allowance import Allowance
from dataloaderjob.core.credentials import Credentials
from dataloaderjob.core.errors import AuthError, ProtocolError
from dataloaderjob.core.handshake import CONTROL, connect, greet
from dataloaderjob.core.keys import Part
from dataloaderjob.core.sockets import Connection, dial
from dataloaderjob.core.tls import check_preamble

KEY, JOB = bytes(range(32)), "job"
ROLE_KEYS = keys.of_roles({"receiver": KEY, "blob": bytes(32)})


def recorded_hello() -> bytes:
    """The first bytes of a connection under TLS, which a stranger can repeat for ever."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    return outgoing.read()


HELLO = recorded_hello()
OTHER_PROOF = opening.prover(b"o" * 32, role="receiver", name="x", protocol=CONTROL.newest)("")


class Port:
    """An acceptor under TLS. A test calls its turns, or lets a thread do so."""

    def __init__(self, home: Path) -> None:
        job = Generations(home)
        self.sidecar = job.of(Part.SIDECAR)
        self.welcomed = 0
        self.acceptor = Acceptor(
            "127.0.0.1",
            0,
            key=ROLE_KEYS,
            job=JOB,
            facts={"is": "here"},
            welcomed=self._welcomed,
            tls=job.of(Part.SUPERVISOR),
        )
        self._stop = False
        self._thread = threading.Thread(target=self._loop)

    def _welcomed(self, sock: Connection, answer: dict[str, object]) -> None:
        self.welcomed += 1
        sock.close()

    def start(self) -> None:
        self._thread.start()

    def _loop(self) -> None:
        while not self._stop:
            time.sleep(0.0005)
            self.acceptor.serve()
            self.acceptor.expire()

    def close(self) -> None:
        self._stop = True
        if self._thread.ident is not None:
            self._thread.join()
        self.acceptor.close()

    def strangers(self, count: int, stack: contextlib.ExitStack, says: bytes = HELLO) -> None:
        """Connects strangers, who begin TLS."""
        for _ in range(count):
            sock = stack.enter_context(
                socket.create_connection(
                    ("127.0.0.1", self.acceptor.port), timeout=PATIENCE_S, source_address=("127.0.0.9", 0)
                )
            )
            sock.sendall(says)

    def lets_in(self, tls: Credentials, within_s: float = PATIENCE_S, role: str = "receiver") -> bool:
        """True if a peer with the key is let in within this time, trying again as peers do."""
        deadline, key = time.monotonic() + within_s, ROLE_KEYS(role, CONTROL.newest, "x")
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError, ProtocolError):
                connect(("127.0.0.1", self.acceptor.port), key, role=role, name="x", job=JOB, tls=tls).close()
                return True
            time.sleep(0.01)
        return False

    @property
    def begun(self) -> int:
        """Number of guests without a proof that have begun TLS."""
        return len(self.acceptor._begun)


@pytest.fixture
def port(tmp_path: Path) -> Iterator[Port]:
    made = Port(tmp_path)
    yield made
    made.close()


@pytest.mark.nightly
@pytest.mark.parametrize("says", [HELLO, OTHER_PROOF + HELLO], ids=["no-proof", "false-proof"])
def test_forty_peers_get_in_while_strangers_begin_tls(port: Port, says: bytes) -> None:
    port.start()
    with (
        flooded("127.0.0.1", port.acceptor.port, rate=1500, held=700, says=says),
        ThreadPoolExecutor(8) as pool,
    ):
        assert all(pool.map(lambda _: port.lets_in(port.sidecar, PATIENCE_S), range(40)))


class Clock:
    """Time that passes by a step at each look."""

    def __init__(self, step_s: float) -> None:
        self.now, self.step_s = 1000.0, step_s

    def monotonic(self) -> float:
        self.now += self.step_s
        return self.now

    sleep = staticmethod(time.sleep)


def test_strangers_who_begin_tls_get_a_share_of_the_time(port: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(0.001)
    monkeypatch.setattr(acceptor, "time", clock)
    monkeypatch.setattr(acceptor, "MAX_UNPROVEN", 10_000)
    with contextlib.ExitStack() as stack:
        port.strangers(300, stack)
        for _ in range(100):
            before = port.begun
            port.acceptor.serve()
            assert port.begun - before <= 6, "a turn ends after its time"
        began = port.begun
        assert 40 <= began <= 110, "no more than was saved up, and a tenth of the time since"
        clock.step_s = 0.0
        for _ in range(10):
            port.acceptor.serve()
            port.acceptor.expire()
        assert port.begun == began, "the others wait"
        clock.now += 60
        port.acceptor.expire()
        assert len(port.acceptor._guests) == 0, "and end in time, without TLS"


def test_strangers_who_begin_tls_hold_a_limited_number_of_places(
    port: Port, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "SHARE", 1.0)
    with contextlib.ExitStack() as stack:
        port.acceptor._allowance = Allowance(1e6, 1e6)
        port.strangers(3 * MAX_UNPROVEN, stack)
        for _ in range(400):
            port.acceptor.serve()
            assert port.begun <= MAX_UNPROVEN
        assert port.begun == MAX_UNPROVEN


@pytest.mark.parametrize("role", ["receiver", "blob"])
def test_peer_with_a_proof_does_not_wait_for_strangers_time(port: Port, role: str) -> None:
    port.acceptor._allowance = Allowance(0.0, 0.0)
    port.start()
    with contextlib.ExitStack() as stack:
        port.strangers(100, stack)
        assert port.lets_in(port.sidecar, role=role)
    assert port.begun == 0


def test_peer_of_a_release_without_proofs_is_let_in(port: Port) -> None:
    port.start()
    with contextlib.ExitStack() as stack:
        port.strangers(200, stack)
        for _ in range(10):  # from an address with fewer guests than the strangers'
            sock = port.sidecar.connected(dial(("127.0.0.1", port.acceptor.port), 5.0), Part.SUPERVISOR)
            with sock:
                facts = greet(sock, KEY, role="receiver", name="x", job=JOB)
            assert facts["is"] == "here"


def test_proof_of_many_pieces_is_read_to_its_last_byte_and_no_further(port: Port) -> None:
    port.start()
    with dial(("127.0.0.1", port.acceptor.port), PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def prove(challenge: str) -> bytes:
            proof = opening.prover(KEY, role="receiver", name="x", protocol=CONTROL.newest)(challenge)
            for byte in proof[:-1]:
                socket.socket.send(tls, bytes([byte]))
                time.sleep(0.001)
            return proof[-1:]

        tls = port.sidecar.connected(sock, Part.SUPERVISOR, prove)
        assert greet(tls, KEY, role="receiver", name="x", job=JOB)["is"] == "here"
        tls.close()


@pytest.mark.parametrize("first", [b"\x00", b"GET / HTTP/1.1\r\n\r\n", b"q" * 100, b"p", b"proof 1\n"])
def test_other_bytes_begin_no_tls_and_end_with_the_reason_or_in_time(
    port: Port, first: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "HANDSHAKE_TIMEOUT_S", 0.1)
    port.start()
    with dial(("127.0.0.1", port.acceptor.port), PATIENCE_S) as sock:
        sock.sendall(first)
        got = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := sock.recv(4096):
                got += piece
    assert b"the connection does not use TLS" in got
    assert port.begun == 0


# The proof

LATER = CONTROL.newest + 1


@given(
    st.text(max_size=40),
    st.sampled_from(["receiver", "blob"]),
    st.text(max_size=40),
    st.floats(0, 1, exclude_max=True),
)
def test_proof_with_any_changed_bit_or_for_another_challenge_is_false(
    challenge: str, role: str, name: str, place: float
) -> None:
    prove = opening.prover(ROLE_KEYS, role=role, name=name, protocol=CONTROL.newest)
    proof = prove(challenge)
    assert opening.wanted(proof) == 0
    assert opening.is_proof(proof, challenge, ROLE_KEYS, CONTROL.newest)
    assert opening.is_proof(proof, challenge, ROLE_KEYS, LATER)
    assert not opening.is_proof(proof, challenge, ROLE_KEYS, CONTROL.newest - 1)
    assert not opening.is_proof(proof, challenge + "x", ROLE_KEYS, CONTROL.newest)
    changed, at = bytearray(proof), opening._HEAD.size + int(place * (len(proof) - opening._HEAD.size))
    changed[at] ^= 1
    assert not opening.is_proof(bytes(changed), challenge, ROLE_KEYS, CONTROL.newest)


@given(
    st.binary(max_size=300) | st.from_regex(rb'\{"role": (1|"receiver"|\[\]), "protocol": (1|4|9|""|1.0)\}')
)
def test_bytes_of_a_stranger_are_no_proof(data: bytes) -> None:
    assert not opening.is_proof(opening._HEAD.pack(b"proof 1\n", len(data)) + data, "", ROLE_KEYS, LATER)
    with contextlib.suppress(AuthError):
        assert opening.wanted(data) <= opening.MAX_PROOF_NBYTES + opening._HEAD.size


def test_name_too_long_for_a_proof_is_sent_without_one() -> None:
    assert opening.prover(KEY, role="blob", name="x" * 2000, protocol=5)("") == b""


def test_two_challenges_differ_and_reveal_nothing_of_the_job() -> None:
    made = [opening.new_challenge() for _ in range(2)]
    assert made[0][0] != made[1][0]
    for challenge, message in made:
        assert check_preamble(message[4:]) == challenge


# The allowance


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 1)), max_size=50))
def test_allowance_never_exceeds_its_share_of_the_time(steps: list[tuple[float, float]]) -> None:
    allowance, now, spent = Allowance(SHARE, 0.05), 5.0, 0.0
    for passes, wants in steps:
        now += passes
        left = allowance.left_s(now)
        assert left <= 0.05
        if left > 0:
            took = min(wants, left)
            allowance.spend(took)
            spent += took
        assert spent <= 0.05 + (now - 5.0) * SHARE + 1e-9
