"""A stopped supervisor returns only once its feeders have ended, since Ray may lose a kill."""

from __future__ import annotations

import logging

import pytest
from fake_provider import FakeProvider

from dataloaderjob.core.errors import ServiceError
from dataloaderjob.supervisor.ending import END_TIMEOUT_S, end_feeders


def end(provider: FakeProvider, *feeders: int) -> None:
    end_feeders(provider, feeders, lambda: provider.now, provider.sleep)


def test_feeders_are_awaited_until_the_provider_finds_none():
    provider = FakeProvider(effective_after_s=0.7)
    provider.running = {0, 1, 2}
    end(provider, 0, 1, 2)
    assert not provider.running
    assert provider.kills == [0, 1, 2]


def test_a_lost_kill_is_sent_again():
    provider = FakeProvider(lost=2)
    provider.running = {3}
    end(provider, 3)
    assert not provider.running
    assert provider.kills == [3, 3, 3]


def test_feeders_of_nobody_else_are_killed():
    provider = FakeProvider()
    provider.running = {0, 7}
    end(provider, 0)
    assert provider.running == {7}


def test_a_feeder_that_cannot_be_ended_is_named(caplog: pytest.LogCaptureFixture):
    provider = FakeProvider(lost=10_000)
    provider.running = {4}
    with caplog.at_level(logging.WARNING):
        end(provider, 4)
    assert "feeder-4 did not end within 10 s" in caplog.text
    assert provider.now <= 2 * END_TIMEOUT_S


def test_a_provider_that_is_gone_ends_the_wait(caplog: pytest.LogCaptureFixture):
    provider = FakeProvider(fails=ServiceError("Ray does not list the feeders: it has ended"))
    provider.running = {4}
    with caplog.at_level(logging.WARNING):
        end(provider, 4)
    assert "feeders may still be running: Ray does not list the feeders" in caplog.text
