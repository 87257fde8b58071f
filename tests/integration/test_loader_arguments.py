"""What each argument of the loader means: as torch's does, and what only the service makes different."""

from __future__ import annotations

import threading
import warnings
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from batches import Augmented, Numbers, epoch, ids
from rig import Rig
from torch import Tensor
from torch.utils import data

from dataloaderjob import DataLoader
from dataloaderjob.core.errors import InputError, RemoteProtocolError, UnsupportedBatch
from dataloaderjob.trainer.epochs import service_iterator
from dataloaderjob.trainer.session import attach, client, private
from dataloaderjob.trainer.session import service as services
from dataloaderjob.trainer.session.service import LeftOut
from dataloaderjob.trainer.session.window import MAX_PREFETCH


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    with Rig(feeders=2) as made:
        yield made


class Locked(Numbers):
    """Cannot be pickled."""

    def __init__(self, n: int = 20) -> None:
        super().__init__(n)
        self.lock = threading.Lock()


class Stream(data.IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(7))


class LockedStream(Stream):
    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __iter__(self) -> Iterator[int]:
        assert data.get_worker_info() is None
        return super().__iter__()


# Types


def test_loader_class_is_generic_like_torchs() -> None:
    class Mine(DataLoader[Tensor]):
        pass

    def takes(loader: DataLoader[Tensor]) -> int:
        return len(loader)

    assert takes(Mine(Numbers(3))) == 3
    assert issubclass(Mine, data.DataLoader)


# The window


@pytest.mark.parametrize(
    ("environment", "arguments", "window"),
    [
        ({}, {"num_workers": 1}, 2),
        ({}, {"num_workers": 32}, 64),
        ({}, {"num_workers": 4, "prefetch_factor": 5}, 20),
        ({"DATALOADERJOB_PREFETCH": "9"}, {"num_workers": 3}, 6),
        ({"DATALOADERJOB_PREFETCH": "9"}, {}, 9),
        ({"DATALOADERJOB_FEEDERS": "4"}, {}, 16),
        ({"DATALOADERJOB_FEEDERS": "40"}, {}, 80),
        ({"DATALOADERJOB_FEEDERS": "4000"}, {}, MAX_PREFETCH),
        ({"DATALOADERJOB_FEEDERS": "40", "DATALOADERJOB_PREFETCH": "9"}, {"prefetch_factor": 3}, 120),
    ],
)
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_default_window_is_torchs_or_sized_to_keep_feeders_busy(
    environment: dict[str, str], arguments: dict[str, int], window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    loader = DataLoader(Numbers(10), **arguments)
    assert loader._window() == window
    names = ("dataset", "num_workers", "prefetch_factor", "persistent_workers", "multiprocessing_context")
    again = DataLoader(**{name: getattr(loader, name) for name in names})
    assert again._window() == window, "a rebuild from attributes keeps it"
    assert type(again.num_workers) is type(loader.num_workers)
    if "num_workers" in arguments:
        assert loader.prefetch_factor == data.DataLoader(Numbers(10), **arguments).prefetch_factor


def test_window_that_leaves_feeders_idle_is_reported_once(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("DATALOADERJOB_FEEDERS", "16")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for _ in range(2):
        assert ids(DataLoader(Numbers(5), num_workers=2)) == list(range(5))
        assert ids(DataLoader(Numbers(5), num_workers=4)) == list(range(5))
    assert capsys.readouterr().err == (
        "[dataloaderjob] 4 prefetched batches cannot keep 8 feeders busy (the job has 16 for 2 ranks): "
        "omit num_workers, or raise prefetch_factor * num_workers\n"
    )


# The private service


@pytest.fixture
def service(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """What the private service is asked for; the rig's sidecar stands for it."""
    asked: list[int] = []
    monkeypatch.delenv("DATALOADERJOB_SOCKET")
    monkeypatch.setattr(private, "ensure", asked.append, raising=False)
    monkeypatch.setattr(private, "wait", lambda: rig.socket)
    monkeypatch.setattr(services, "_most_workers", 0)
    return asked


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_feeder_count_grows_at_first_iter_and_never_shrinks(service: list[int]) -> None:
    validation, train = DataLoader(Numbers(5), num_workers=1), DataLoader(Numbers(5), num_workers=3)
    never = DataLoader(Numbers(5), num_workers=1000)
    assert service == []
    assert ids(validation) == list(range(5))
    assert set(service) == {1}
    assert ids(train) == ids(validation) == list(range(5))
    assert set(service) == {1, 3}
    assert service[-1] == 3, "the largest number so far"
    del never


def test_more_workers_than_processors_warn_as_in_torch(
    service: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def told(kind: type) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            kind(Numbers(5), num_workers=1000)
        return [str(w.message) for w in caught]

    assert told(data.DataLoader) == told(DataLoader)
    assert len(told(DataLoader)) == 1
    monkeypatch.setenv("DATALOADERJOB_SOCKET", "/somewhere")
    assert told(DataLoader) == [], "a job's feeders are elsewhere"


# num_workers left out


@pytest.mark.parametrize("options", [{}, {"persistent_workers": True, "timeout": 5}], ids=str)
def test_unsendable_dataset_stays_in_process_without_num_workers(
    rig: Rig, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    found = []
    for dataset, more in ((Locked(), options), (Numbers(20), {"num_workers": 0})):
        torch.manual_seed(4)
        loader = DataLoader(dataset, batch_size=3, shuffle=True, **more)
        found.append(([epoch(loader) for _ in range(2)], torch.get_rng_state().tolist()))
    assert found[0][0][0] == found[1][0][0]
    if not options:
        assert found[0] == found[1], "the generators go on as without workers"
    (said,) = capsys.readouterr().err.splitlines()
    assert said.startswith(
        "[dataloaderjob] num_workers was omitted, so batches are made in this process: feeders need a copy"
    )
    assert "dataset.lock" in said
    with pytest.raises(InputError, match=r"dataset\.lock"):
        iter(DataLoader(Locked(), num_workers=2))


@pytest.mark.parametrize("options", [{}, {"timeout": 5, "batch_size": None}], ids=str)
def test_stream_is_one_slot_without_num_workers(rig: Rig, options: dict[str, Any]) -> None:
    loader = DataLoader(Stream(), **options)
    for _ in range(2):
        assert [int(x) for x in loader] == list(range(7))


def test_unsendable_stream_stays_in_process_without_num_workers(
    rig: Rig, capsys: pytest.CaptureFixture[str]
) -> None:
    loader = DataLoader(LockedStream())
    for _ in range(2):
        assert [int(x) for x in loader] == list(range(7))
    (said,) = capsys.readouterr().err.splitlines()
    assert "so batches are made in this process: " in said
    assert "dataset.lock" in said
    with pytest.raises(InputError, match=r"dataset\.lock"):
        iter(DataLoader(LockedStream(), num_workers=2))


class Sharded(data.IterableDataset):
    def __iter__(self) -> Iterator[tuple[int, int]]:
        info = data.get_worker_info()
        assert info is not None
        return iter([(info.id, i) for i in range(info.id, 12, info.num_workers)])


class LockedShards(Sharded):
    def __init__(self) -> None:
        self.lock = threading.Lock()


@pytest.mark.parametrize(
    "options", [{}, {"persistent_workers": True, "timeout": 20}, {"multiprocessing_context": "fork"}], ids=str
)
def test_scripts_unsendable_stream_runs_in_torchs_workers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    monkeypatch.delenv(services.SOCKET_VARIABLE, raising=False)
    torch.manual_seed(3)
    expected = [b.tolist() for pair in data.DataLoader(Sharded(), 3, num_workers=2, **options) for b in pair]
    after = torch.rand(1)
    torch.manual_seed(3)
    loader = DataLoader(LockedShards(), 3, num_workers=2, **options)
    assert [b.tolist() for pair in loader for b in pair] == expected
    assert torch.equal(torch.rand(1), after)  # no draw was made for the iterator that came to nothing
    assert [b.tolist() for pair in loader for b in pair] == expected
    assert "torch's worker processes make the batches: " in capsys.readouterr().err


class Pairs(data.Dataset[Any]):
    """A module has no attribute of its tuple's name."""

    Pair = namedtuple("OfNoModule", "number square")  # noqa: PYI024

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        return self.Pair(i, self.Pair(i, i * i))


def test_nested_named_tuple_class_arrives_unchanged(rig: Rig) -> None:
    for batch in DataLoader(Pairs(), batch_size=2, num_workers=2):
        assert type(batch) is type(batch.square) is Pairs.Pair
        assert batch.square.square.tolist() == [i * i for i in batch.number.tolist()]


def test_loader_within_a_feeder_works_in_process_without_num_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(services.IN_FEEDER_VARIABLE, "1")
    assert ids(DataLoader(Numbers(5))) == list(range(5))


def test_timeout_without_workers_is_refused_as_in_torch() -> None:
    for kind in (data.DataLoader, DataLoader):
        with pytest.raises(AssertionError, match="requires timeout == 0"):
            iter(kind(Numbers(5), num_workers=0, timeout=3))


def test_multiprocessing_context_is_checked_and_ignored(rig: Rig, capsys: pytest.CaptureFixture[str]) -> None:
    for value, error in (("no-such", ValueError), (7, TypeError)):
        for kind in (data.DataLoader, DataLoader):
            with pytest.raises(error):
                kind(Numbers(5), num_workers=1, multiprocessing_context=value)
    for kind in (data.DataLoader, DataLoader):
        with pytest.raises(ValueError, match="multi-process"):
            kind(Numbers(5), num_workers=0, multiprocessing_context="spawn")
    assert ids(DataLoader(Numbers(5), num_workers=1, multiprocessing_context="spawn")) == list(range(5))
    assert "multiprocessing_context is ignored" in capsys.readouterr().err


# allow_pickle


class Parcel:
    """Travels pickled only."""

    __slots__ = ("content",)


class Odd(Numbers):
    def __getitem__(self, i: int) -> Any:
        return Parcel()


def test_pickles_are_allowed_only_by_this_process(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedBatch):
        next(iter(DataLoader(Odd(3), batch_size=None)))
    assert type(next(iter(DataLoader(Odd(3), batch_size=None, allow_pickle=True)))) is Parcel
    monkeypatch.setenv("DATALOADERJOB_ALLOW_PICKLE", "1")
    assert type(next(iter(DataLoader(Odd(3), batch_size=None)))) is Parcel


def test_pickles_are_refused_even_if_sidecar_and_feeders_allow_them(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attached(*args: Any) -> attach.Attachment:
        sock, told, fds = attach.attach(*args)
        return sock, {**told, "allow_pickle": True}, fds

    def allowed(*args: Any, **options: Any) -> Any:
        return replace(make_bundle(*args, **options), allow_pickle=True)

    make_bundle = service_iterator.make_bundle
    monkeypatch.setattr(client, "attach", attached)
    monkeypatch.setattr(service_iterator, "make_bundle", allowed)  # as if the sidecar had told feeders so
    monkeypatch.setenv("DATALOADERJOB_SOCKET", rig.another_sidecar("generous"))
    iterator = iter(DataLoader(Odd(3), batch_size=None))
    assert iterator._client.settings["allow_pickle"]
    with pytest.raises(RemoteProtocolError, match="a pickled leaf, which this process does not load"):
        next(iterator)


# The profiler


@pytest.mark.parametrize("options", [{}, {"num_workers": 0}], ids=str)
def test_next_appears_in_a_profile_under_torchs_name(rig: Rig, options: dict[str, int]) -> None:
    loader = DataLoader(Numbers(6), batch_size=2, **options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        assert len(list(loader)) == 3
    (found,) = [e for e in profile.key_averages() if e.key.startswith("enumerate(DataLoader)#")]
    assert found.key.endswith("Iterator.__next__")
    assert found.count == 4


# Rebuilding


def test_omitted_num_workers_still_behaves_like_a_number() -> None:
    loader = DataLoader(Numbers(5))
    assert isinstance(loader.num_workers, LeftOut)
    assert loader.num_workers > 0
    assert f"{loader.num_workers}".isdigit()
    assert loader.prefetch_factor is None


def test_augmentation_equals_the_in_process_one_for_any_arguments(rig: Rig) -> None:
    found = []
    for options in ({"num_workers": 0}, {}, {"num_workers": 3}, {"num_workers": 1, "prefetch_factor": 1}):
        torch.manual_seed(3)
        found.append(epoch(DataLoader(Augmented(40), batch_size=4, shuffle=True, **options)))
    assert all(f == found[0] for f in found)
