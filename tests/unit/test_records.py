"""The rows of a record: pieces of a run that was resumed are one run, and nothing is missing unseen."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob import DataLoader
from dataloaderjob.core import ticket_codec
from dataloaderjob.core.consumption import Consumption, fold
from dataloaderjob.core.errors import InputError
from dataloaderjob.core.records import HEAD, NO_BUNDLE, ROW, Record
from dataloaderjob.trainer.resume import recording
from dataloaderjob.trainer.resume.recording import FLUSH_ROWS, Recorder, Recording


def write(
    folder: Path, consumption: Consumption, places: list[tuple[int, int]], *, flush: bool = True
) -> Recorder:
    """One process that gives these (epoch, batch), and whose digests say which they are."""
    recorder = Recorder(folder, "0")
    recordings: dict[int, Recording] = {}
    for epoch, number in places:
        if epoch not in recordings:
            consumption.begin()
            recordings[epoch] = Recording(recorder, consumption, NO_BUNDLE)
        digest = 1000 * epoch + number
        consumption.rolling = fold(consumption.rolling, digest)
        recordings[epoch].ask(number, ticket_codec.pack_ticket(7, number, [digest]))
        recordings[epoch].give(number, digest, consumption.rolling)
    if flush:
        recorder.flush()
    return recorder


def places(folder: Path) -> list[tuple[int, int]]:
    return [found.row.place for batches in Record.open(folder).batches("0").values() for found in batches]


WHOLE = [(epoch, number) for epoch in range(3) for number in range(4)]


def test_row_round_trips_with_its_ticket(tmp_path: Path) -> None:
    write(tmp_path, Consumption(), WHOLE)
    record = Record.open(tmp_path)
    found = record.batches("0")[0]
    assert [f.row.digest for f in found] == [1000 * epoch + number for epoch, number in WHOLE]
    assert [ticket_codec.unpack_ticket(f.piece.ticket(f.row)).keys for f in found] == [
        [f.row.digest] for f in found
    ]
    assert found[0].piece.bundle(found[0].row) is None


def test_row_of_a_batch_made_in_the_trainer_has_its_draw_number(tmp_path: Path) -> None:
    recorder, consumption = Recorder(tmp_path, "0"), Consumption()
    consumption.begin()
    made = Recording(recorder, consumption, NO_BUNDLE)
    made.ask_here(0, ticket_codec.Ticket(7, 0, False, [5], draws=3))
    made.give(0, 1, fold(consumption.rolling, 1))
    recorder.flush()
    (found,) = Record.open(tmp_path).batches("0")[0]
    assert ticket_codec.unpack_ticket(found.piece.ticket(found.row)).draws == 3


@given(stopped=st.integers(1, len(WHOLE)), back=st.integers(0, 5))
def test_run_resumed_before_its_end_reads_as_one(
    tmp_path_factory: pytest.TempPathFactory, stopped: int, back: int
) -> None:
    folder = tmp_path_factory.mktemp("record")
    resumed = max(0, stopped - back)
    write(folder, Consumption(), WHOLE[:stopped])
    checkpoint = Consumption()
    for at, (epoch, number) in enumerate(WHOLE[:resumed]):
        if not at or WHOLE[at - 1][0] != epoch:
            checkpoint.begin()
        checkpoint.rolling = fold(checkpoint.rolling, 1000 * epoch + number)
    second = Consumption()
    within = 0 < resumed < len(WHOLE) and WHOLE[resumed][0] == WHOLE[resumed - 1][0]
    if resumed:
        second.restore(checkpoint.state(), goes_on=within)
    write(folder, second, WHOLE[resumed:])
    assert places(folder) == WHOLE


def test_pieces_are_ordered_by_their_start_as_a_number(tmp_path: Path) -> None:
    consumption = Consumption()
    for start, part in (("9", WHOLE[:8]), ("10", WHOLE[8:])):
        before = set(tmp_path.glob("rank-0/*"))
        write(tmp_path, consumption, part)
        for path in set(tmp_path.glob("rank-0/*")) - before:
            path.rename(path.with_stem(f"{start}-1"))
    assert places(tmp_path) == WHOLE


def test_partial_row_is_ignored(tmp_path: Path) -> None:
    write(tmp_path, Consumption(), WHOLE)
    (rows,) = tmp_path.glob("rank-0/*.rows")
    rows.write_bytes(rows.read_bytes()[:-1])
    assert places(tmp_path) == WHOLE[:-1]


@given(at=st.integers(0, len(WHOLE) - 2))
def test_missing_row_within_an_epoch_is_noticed(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    folder = tmp_path_factory.mktemp("record")
    write(folder, Consumption(), WHOLE)
    (rows,) = folder.glob("rank-0/*.rows")
    data = rows.read_bytes()
    start = HEAD.size + at * ROW.size
    rows.write_bytes(data[:start] + data[start + ROW.size :])
    if WHOLE[at][1] == 3:  # the last of an epoch: where that ends, only another run can tell
        assert places(folder) == [place for place in WHOLE if place != WHOLE[at]]
    else:
        with pytest.raises(InputError, match="is incomplete: the rows before loader 0"):
            places(folder)


def test_foreign_file_is_refused_as_a_record(tmp_path: Path) -> None:
    (tmp_path / "rank-0").mkdir()
    (tmp_path / "rank-0" / "1-1.rows").write_bytes(b"hello")
    with pytest.raises(InputError, match=r"1-1\.rows is not a record of this version"):
        places(tmp_path)


def test_killed_process_loses_a_bounded_number_of_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "FLUSH_S", float("inf"))
    many = [(0, number) for number in range(2 * FLUSH_ROWS + 5)]
    write(tmp_path, Consumption(), many, flush=False)
    assert places(tmp_path) == many[: 2 * FLUSH_ROWS]


def test_state_has_all_counted_batches_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATALOADERJOB_RECORD", str(tmp_path))
    monkeypatch.setattr(recording, "_recorder", None)
    loader = DataLoader(list(range(10)), batch_size=2, num_workers=0)
    batches = iter(loader)
    for number in range(5):
        next(batches)
        (batches if number % 2 else loader).state_dict()
        assert places(tmp_path) == [(0, before) for before in range(number + 1)]
    assert list(Record.open(tmp_path).batches("0")) == [loader.consumption.loader], (
        "probes are no batches of the run"
    )


def test_batch_given_twice_by_an_interrupt_has_one_row(tmp_path: Path) -> None:
    consumption = Consumption()
    consumption.begin()
    recorder = Recorder(tmp_path, "0")
    made = Recording(recorder, consumption, NO_BUNDLE)
    made.ask(0, b"ticket")
    for _ in range(2):
        made.give(0, 5, fold(1, 5))
    made.end()
    assert places(tmp_path) == [(0, 0)]


def test_full_disk_ends_the_record_with_a_log_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    recorder = write(tmp_path, Consumption(), WHOLE[:2])
    monkeypatch.setattr(recorder, "_append", full)
    consumption = Consumption()
    consumption.begin()
    made = Recording(recorder, consumption, NO_BUNDLE)
    for number in range(2):
        made.ask(number, b"ticket")
        made.give(number, 5, 5)
        made.end()
    assert capsys.readouterr().err.count("No space left on device") == 1
    assert places(tmp_path) == WHOLE[:2]
