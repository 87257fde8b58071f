"""An operator's writes, held back while its Lease may be another's."""

from __future__ import annotations

import asyncio

import pytest

from dataloaderjob_operator.client import ApiClient, ApiError
from dataloaderjob_operator.election import Timing
from dataloaderjob_operator.write_gate import WriteGate


def test_writes_wait_while_the_gate_is_shut_and_then_proceed():
    async def scenario() -> list[str]:
        gate, done = WriteGate(), list[str]()

        async def write(name: str) -> None:
            async with gate.passing():
                done.append(name)

        await write("before")
        gate.shut()
        waits = asyncio.create_task(write("after"))
        await asyncio.sleep(0.01)
        assert (done, gate.is_open) == (["before"], False)
        gate.open()
        await waits
        return done

    assert asyncio.run(scenario()) == ["before", "after"]


class Hanging(ApiClient):
    """A client whose API server does not answer."""

    async def _request(self, *_: object, **__: object) -> dict[str, object]:
        await asyncio.sleep(60)
        return {}


def test_write_in_progress_is_abandoned_when_the_gate_is_shut():
    async def scenario() -> None:
        client = Hanging(None)  # type: ignore[arg-type]  it sends nothing
        write = asyncio.create_task(client.create_event({"metadata": {"namespace": "team"}}))
        await asyncio.sleep(0.01)
        client.gate.shut()
        with pytest.raises(ApiError, match="the operator could not renew its Lease") as found:
            await write
        assert found.value.code == 0, "told and tried again as a server that does not answer"

    asyncio.run(scenario())


@pytest.mark.parametrize("times", [(10, 10.0, 2.0), (15, 3.0, 2.0), (15, 10.0, 0.5), (2, 10.0, 2.0)])
def test_lease_times_that_allow_two_leaders_are_refused(times: tuple[int, float, float]):
    with pytest.raises(ValueError, match="the lease must be longer"):
        Timing(*times)


def test_lease_times_equal_those_of_kubernetes_components():
    assert Timing() == Timing(15, 10.0, 2.0)
