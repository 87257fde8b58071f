"""`dataloaderjob map`, without feeders: which files there are, what becomes a column, and a folder that a killed
process left behind."""

from __future__ import annotations

import errno
import itertools
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dataloaderjob.core.errors import InputError
from dataloaderjob.local import cli
from dataloaderjob.local.mapping.command import progress_line
from dataloaderjob.local.mapping.folder import DONE, RECORD, Folder
from dataloaderjob.local.mapping.messages import from_message, to_message
from dataloaderjob.local.mapping.plan import Work, differences, whole_batches
from dataloaderjob.local.mapping.rows import record_batch


def work(rows: int = 10, batch_size: int = 2, rows_per_file: int = 4, **options: Any) -> Work:
    names = {"script": "s.py", "dataset": "d", "function": "f", "collate_fn": None, **options}
    return Work(
        rows=rows, batch_size=batch_size, rows_per_file=whole_batches(rows_per_file, batch_size), **names
    )


# The plan


@given(
    rows=st.integers(0, 300),
    batch_size=st.integers(1, 40),
    rows_per_file=st.integers(1, 90),
    there=st.sets(st.integers(0, 300)),
)
def test_each_row_is_in_one_batch_of_one_file_for_any_existing_files(rows, batch_size, rows_per_file, there):
    made = work(rows, batch_size, rows_per_file)
    parts = made.left(())
    names = [part.name for part in parts]
    batches = [batch for part in parts for batch in part.batches(batch_size)]
    assert list(itertools.chain.from_iterable(batches)) == list(range(rows))
    assert all(len(batch) == batch_size for batch in batches[:-1])
    assert names == sorted(set(names))
    assert len(names) == made.num_parts
    found = {name for number, name in enumerate(names) if number in there}
    assert {part.name for part in made.left(found)} == set(names) - found


def test_names_sort_in_row_order_for_any_number_of_files():
    names = [part.name for part in work(rows=100_001, batch_size=1, rows_per_file=1).left(())]
    assert names == sorted(names)
    assert names[0] == "part-000000-of-100001.parquet"


def test_differing_settings_are_reported_with_both_values():
    told = differences(work(function="g"), work(batch_size=4).as_record())
    assert told == ["function is f there and g here", "--batch-size is 4 there and 2 here"]


def test_progress_line_shows_rows_rate_and_time_left():
    assert progress_line(1000, 640, 420, 2.0) == "640 of 1000 rows (64%), 210.0 rows/s, 2 s left"


# Columns


@pytest.mark.parametrize(
    ("value", "type_", "rows"),
    [
        (torch.tensor([1, 2]), "int64", [1, 2]),
        (torch.ones(2, requires_grad=True), "float", [1.0, 1.0]),
        (torch.ones(2, dtype=torch.bfloat16), "float", [1.0, 1.0]),
        (np.ones(2, np.float16), "halffloat", [1.0, 1.0]),
        (np.arange(4, dtype=np.uint8)[::2], "uint8", [0, 2]),
        (np.array(["a", "bb"]), "string", ["a", "bb"]),
        (np.array(["a", None], object), "string", ["a", None]),
        (
            torch.arange(8).reshape(2, 2, 2).transpose(1, 2),
            "fixed_size_list<item: fixed_size_list<item: int64>[2]>[2]",
            [[[0, 2], [1, 3]], [[4, 6], [5, 7]]],
        ),
        (["a", None], "string", ["a", None]),
        (range(2), "int64", [0, 1]),
        ([torch.tensor(1.0), np.float32(2)], "float", [1.0, 2.0]),
        ([torch.tensor([1.0]), np.zeros(0, np.float32)], "list<item: float>", [[1.0], []]),
        ([np.zeros((1, 2), np.uint8)] * 2, "list<item: list<item: uint8>>", [[[0, 0]]] * 2),
        ([{"a": 1}, {"a": 2}], "struct<a: int64>", [{"a": 1}, {"a": 2}]),
        (pd.Series([1.5, 2.5]), "double", [1.5, 2.5]),
        (pa.array([1, 2], pa.int8()), "int8", [1, 2]),
        (pa.chunked_array([[1], [2]]), "int64", [1, 2]),
    ],
    ids=str,
)
def test_column_keeps_its_type_and_rows(value: Any, type_: str, rows: list[Any]) -> None:
    made = from_message(to_message(record_batch({"c": value}, range(6, 8))))
    assert made.schema.names == ["index", "c"]
    assert str(made.schema.field("c").type) == type_
    assert made.to_pydict() == {"index": [6, 7], "c": rows}


@pytest.mark.parametrize(
    "result",
    [
        pa.table({"c": [1, 2]}),
        pa.record_batch({"c": [1, 2]}),
        pd.DataFrame({"c": [1, 2]}),
        {"c": [1, 2]},
        NamedTuple("Row", [("c", list)])([1, 2]),
    ],
    ids=lambda result: type(result).__name__,
)
def test_a_table_gives_its_columns(result: Any) -> None:
    assert record_batch(result, range(2)).to_pydict() == {"index": [0, 1], "c": [1, 2]}


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ({"c": torch.ones(3)}, "column 'c' of the result for rows 0 to 1 must have 2 rows, but has 3"),
        ((torch.ones(2), torch.ones(2)), "a tuple of 2 for rows 0 to 1: return a dict"),
        (None, "column 'result' of the result for rows 0 to 1 cannot be written: it is of type NoneType"),
        ("ab", "it is of type str, which has no rows"),
        (torch.tensor(1.0), "it has no dimension"),
        (np.zeros((2, 0)), "a row has no element"),
        ([object(), object()], "column 'result' of the result for rows 0 to 1 cannot be written"),
        (torch.zeros(2, dtype=torch.complex64), "cannot be written: Unsupported"),
        (torch.zeros(2, 2).to_sparse(), "cannot be written"),
        ([[1], ["a"]], "cannot be written"),
        ({"index": [1, 2]}, "a column 'index' for rows 0 to 1, but that column holds"),
        ({}, "no column for rows 0 to 1"),
        (pa.table([[1, 2], [3, 4]], names=["c", "c"]), "columns of the result for rows 0 to 1 share a name"),
        ({1: [1, 2]}, "column names must be strings, but"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else type(value).__name__,
)
def test_invalid_column_is_refused_by_name_and_rows(result: Any, told: str) -> None:
    with pytest.raises(InputError) as found:
        record_batch(result, range(2))
    assert told in str(found.value)


def test_categories_of_batches_may_differ(tmp_path: Path) -> None:
    with Folder.open(tmp_path, work(rows=4), "digest") as folder:
        batches = [
            record_batch({"c": pa.array(words).dictionary_encode()}, range(at, at + 2))
            for at, words in ((0, ["a", "b"]), (2, ["c", "a"]))
        ]
        for batch in batches:
            folder.check(batch, range(2))
        folder.write(folder.left[0], batches)
    assert pq.read_table(tmp_path)["c"].to_pylist() == ["a", "b", "c", "a"]


# The folder


def fill(path: Path, made: Work | None = None, value: Callable[[int], Any] = float) -> None:
    """Writes all that is left."""
    made = made or work()
    with Folder.open(path, made, "digest") as folder:
        for part in folder.left:
            batches = []
            for rows in part.batches(made.batch_size):
                batch = record_batch({"c": [value(row) for row in rows]}, rows)
                folder.check(batch, rows)
                batches.append(batch)
            folder.write(part, batches)
        folder.finish()


def contents(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


def killed_at(call: int, what: Callable[[], None]) -> bool:
    """Runs `what` in a child that ends, as by SIGKILL, before its call `call` of these functions of the system."""
    pid = os.fork()
    if pid == 0:
        try:
            left = itertools.count(call, -1)

            def dying(function: Any) -> Any:
                def wrapped(*args: Any, **kwargs: Any) -> Any:
                    if next(left) == 0:
                        os._exit(9)
                    return function(*args, **kwargs)

                return wrapped

            os.fsync, os.rename, Path.rename = dying(os.fsync), dying(os.rename), dying(Path.rename)
            Path.open, Path.touch, pq.write_table = (
                dying(Path.open),
                dying(Path.touch),
                _torn(dying(lambda: None)),
            )
            what()
        except BaseException:
            os._exit(1)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, 9)
    return code == 9


def _torn(die: Callable[[], None]) -> Callable[..., None]:
    """pyarrow's `write_table`, with a call of `die` after half of the bytes."""
    write_table = pq.write_table

    def write(table: pa.Table, file: Any) -> None:
        if isinstance(file, pa.NativeFile):
            write_table(table, file)
            return
        whole = pa.BufferOutputStream()
        write_table(table, whole)
        data = whole.getvalue().to_pybytes()
        file.write(data[: len(data) // 2])
        file.flush()
        die()
        file.write(data[len(data) // 2 :])

    return write


def test_run_killed_at_any_call_can_be_resumed(tmp_path: Path) -> None:
    fill(tmp_path / "whole")
    expected = contents(tmp_path / "whole")
    assert sorted(expected) == [DONE, RECORD, *(f"part-0000{n}-of-00003.parquet" for n in range(3))]
    calls = 0
    while True:
        path = tmp_path / str(calls)
        if not killed_at(calls, lambda path=path: fill(path)):
            break
        for name in path.glob("part-*") if path.exists() else ():
            assert name.read_bytes() == expected[name.name]
        assert not (path / DONE).exists() or contents(path) == expected
        fill(path)
        assert contents(path) == expected
        calls += 1
    assert calls > 12


def test_run_killed_repeatedly_still_completes(tmp_path: Path) -> None:
    fill(tmp_path / "whole")
    while killed_at(7, lambda: fill(tmp_path / "a")):
        pass
    assert contents(tmp_path / "a") == contents(tmp_path / "whole")


def test_deleted_file_is_made_again(tmp_path: Path) -> None:
    fill(tmp_path)
    expected = contents(tmp_path)
    (tmp_path / "part-00001-of-00003.parquet").unlink()
    with Folder.open(tmp_path, work(), "digest") as folder:
        assert [part.number for part in folder.left] == [1]
        assert not (tmp_path / DONE).exists(), "not all files are there"
    fill(tmp_path)
    assert contents(tmp_path) == expected


def test_file_counts_as_soon_as_it_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: Folder) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Folder, "_sync", interrupted)
    with Folder.open(tmp_path, work(), "digest") as folder:
        with pytest.raises(KeyboardInterrupt):
            folder.write(folder.left[0], [record_batch([1.0, 2.0], range(2))])
        assert folder.num_there() == 1


def test_a_folder_of_other_work_is_refused_and_left_alone(tmp_path: Path) -> None:
    fill(tmp_path)
    before = contents(tmp_path)
    with pytest.raises(InputError, match=r"length is 10 there and 12 here\. .* choose another folder"):
        fill(tmp_path, work(rows=12))
    assert contents(tmp_path) == before


def test_a_folder_with_anything_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(InputError, match=r"contains 'thesis.tex' and no _map.json"):
        fill(tmp_path)
    assert contents(tmp_path) == {"thesis.tex": b""}


def test_folder_without_a_result_can_be_reused(tmp_path: Path) -> None:
    with Folder.open(tmp_path, work(rows=99), "digest"):
        pass
    fill(tmp_path)
    assert pq.read_table(tmp_path)["index"].to_pylist() == list(range(10))


@pytest.mark.parametrize("name", [RECORD, DONE])
def test_links_in_the_folder_are_never_written_through(tmp_path: Path, name: str) -> None:
    folder, victim = tmp_path / "out", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    with Folder.open(folder, work(), "digest"):
        pass
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(victim)
    with (
        pytest.raises(
            InputError, match="must be a regular file, but is a link: choose a folder that only you"
        ),
        Folder.open(folder, work(), "digest") as made,
    ):
        (folder / name).unlink(missing_ok=True)  # DONE is taken away where files are left
        (folder / name).symlink_to(victim)
        made.finish()
    assert victim.read_text() == "mine"


def test_link_with_an_unfinished_files_name_is_replaced(tmp_path: Path) -> None:
    folder, victim = tmp_path / "out", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("mine")
    with Folder.open(folder, work(), "digest") as made:
        part = made.left[0]
        (folder / f".unfinished-{part.name}").symlink_to(victim)
        made.write(part, [record_batch({"c": [1.0]}, range(1))])
    assert victim.read_text() == "mine"
    assert not (folder / part.name).is_symlink()


def test_a_pipe_in_place_of_the_record_is_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / RECORD)
    with pytest.raises(InputError, match="but is something else"), Folder.open(tmp_path, work(), "digest"):
        pass


@pytest.mark.skipif(os.getuid() != 0, reason="only root can make a link of another user's")
def test_link_of_another_user_as_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "elsewhere")
    os.lchown(tmp_path / "out", 4321, 4321)
    with pytest.raises(InputError, match="a link of user 4321"), Folder.open(tmp_path / "out", work(), "d"):
        pass


def test_two_processes_cannot_write_to_one_folder(tmp_path: Path) -> None:
    with (
        Folder.open(tmp_path, work(), "digest"),
        pytest.raises(InputError, match="another process is writing to"),
    ):
        fill(tmp_path)


@pytest.mark.parametrize("stopped", [False, True], ids=["one-run", "gone-on-with"])
def test_changed_columns_are_refused_by_name_and_place(tmp_path: Path, stopped: bool) -> None:
    def mixed(row: int) -> Any:
        return "text" if row >= 6 else row

    if stopped:
        fill(tmp_path, value=int)
        (tmp_path / "part-00001-of-00003.parquet").unlink()
        wanted = "column 'c' is string in rows 4 to 5 and int64 in part-00000-of-00003.parquet"
        with pytest.raises(InputError, match=wanted):
            fill(tmp_path, value=str)
        return
    with pytest.raises(InputError, match="column 'c' is string in rows 6 to 7 and int64 in rows 0 to 1"):
        fill(tmp_path, value=mixed)
    assert [path.name for path in tmp_path.glob("part-*")] == ["part-00000-of-00003.parquet"]


def test_type_that_parquet_stores_differently_is_no_difference(tmp_path: Path) -> None:
    def moment(row: int) -> Any:
        return np.datetime64(row, "s")

    fill(tmp_path, value=moment)
    expected = contents(tmp_path)
    (tmp_path / "part-00001-of-00003.parquet").unlink()
    fill(tmp_path, value=moment)
    assert contents(tmp_path) == expected


def test_full_disk_leaves_no_file_with_a_results_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(table: pa.Table, file: Any) -> None:
        file.write(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pq, "write_table", full)
        with pytest.raises(OSError, match="No space left"), Folder.open(tmp_path, work(), "digest") as folder:
            folder.write(folder.left[0], [record_batch([1.0, 2.0], range(2))])
    assert list(tmp_path.glob("part-*")) == []
    fill(tmp_path)
    assert not list(tmp_path.glob(".*"))


# The command


def test_map_without_pyarrow_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "pyarrow.parquet")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert cli.main(["map", "s.py", "d", "f", "--output", "o"]) == 2
    assert "requires the module 'pyarrow': pip install 'dataloaderjob[map]'" in capsys.readouterr().err
