"""The rules that every commit of a table keeps."""

from __future__ import annotations

import datetime
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("pyarrow")

from jetspark.errors import ArchiveDamaged, ArchiveMoved, ConfigError, UsageError
from jetspark.lake.position import (
    ArchivePosition,
    DataFile,
    Snapshot,
    StreamIdentity,
    checked_snapshot,
    coverage_of,
    data_path,
    files_after,
    new_snapshot,
)

DAY = datetime.date(2026, 11, 19)
IDENTITY = StreamIdentity("ORDERS", "2026-11-19T10:14:30.123456Z")


def file(begin: int, end: int, **changes: Any) -> DataFile:
    known = {"rows": end - begin, "min_sequence": begin, "max_sequence": end - 1}
    return DataFile(
        path=data_path(DAY, begin, end, "0123abcd"),
        day=DAY,
        begin=begin,
        end=end,
        size_bytes=1,
        min_time_us=0,
        max_time_us=0,
        **(known | changes),
    )


def at(next_: int, **changes: Any) -> ArchivePosition:
    known: dict[str, Any] = {"identity": IDENTITY, "first": 1, "next": next_, "epoch": 5}
    return ArchivePosition(**(known | changes))


BASE = Snapshot(position=at(21), files=(file(1, 11), file(11, 21)), version=3)


def test_a_commit_adds_files_where_the_table_ends() -> None:
    files = files_after("/lake", BASE, at(41), [file(31, 41), file(21, 31)], [])
    assert [each.begin for each in files] == [1, 11, 21, 31]


def test_a_commit_replaces_files_by_others_for_the_same_sequences() -> None:
    files = files_after("/lake", BASE, at(21), [file(1, 21)], BASE.files)
    assert [(each.begin, each.end) for each in files] == [(1, 21)]


@pytest.mark.parametrize(
    ("position", "add", "remove", "message"),
    [
        (at(31), [], [], "cover the sequences up to 20, and its position says 30"),
        (at(41), [file(31, 41)], [], "leave a gap at sequence 21"),
        (at(31), [file(20, 31)], [], "overlap at sequence 20"),
        (at(31), [file(21, 31), file(25, 31)], [], "overlap at sequence 25"),
        (at(31), [file(21, 31, rows=0)], [], "has 0 rows"),
        (at(31), [file(21, 31, max_sequence=31)], [], "sequences 21 to 31"),
        (at(21), [], [file(1, 11)], "leave a gap at sequence 1"),
        (at(21), [], [file(1, 12)], "is not in the table"),
        (at(21), [file(1, 11)], [], "is in the table already"),
        (at(11), [], [file(11, 21)], "cannot follow"),
        (at(31, first=2), [file(21, 31)], [], "cannot follow"),
        (at(31, identity=StreamIdentity("OTHER", IDENTITY.created)), [file(21, 31)], [], "cannot follow"),
    ],
)
def test_a_commit_that_would_break_the_coverage_is_refused(
    position: ArchivePosition, add: list[DataFile], remove: list[DataFile], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        files_after("/lake", BASE, position, add, remove)


def test_a_writer_with_a_lower_epoch_is_refused() -> None:
    with pytest.raises(ArchiveMoved, match="now at sequence 21"):
        files_after("/lake", BASE, at(31, epoch=4), [file(21, 31)], [])
    assert files_after("/lake", BASE, at(31, epoch=6), [file(21, 31)], [])


def test_a_table_whose_files_do_not_fit_is_damaged() -> None:
    assert checked_snapshot("/lake", at(21), reversed(BASE.files), 3) == BASE
    with pytest.raises(ArchiveDamaged, match=r"gap at sequence 1.*version 3.*restore an older version"):
        checked_snapshot("/lake", at(21), BASE.files[1:], 3)


@pytest.mark.parametrize(
    ("path", "begin", "end"),
    [("day=2026-11-19/00000000000000000001-00000000000000000011-0123abcd.parquet", 1, 11)],
)
def test_the_path_of_a_file_has_what_it_covers(path: str, begin: int, end: int) -> None:
    assert data_path(DAY, begin, end, "0123abcd") == path
    assert coverage_of(path) == (DAY, begin, end)
    for other in (path.replace("parquet", "csv"), path.replace("11-19", "13-19"), f"x/{path}", "part-0.parquet"):
        assert coverage_of(other) is None


@given(
    st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
    | st.sampled_from(["\udcff", "~41", "a/b", "ä", "..", "~"]),
    st.sampled_from(["2026-11-19T10:14:30Z", "2026-11-19T10:14:30.123456Z", "2026-11-19T10:14:30.000001Z"]),
)
def test_each_incarnation_of_a_stream_has_a_folder_of_its_own(stream: str, created: str) -> None:
    identity = StreamIdentity(stream, created)
    assert StreamIdentity.of_folder(identity.folder) == identity
    assert identity.folder.count("/") == 1
    assert not set(identity.folder) & set(': \\%?#"*<>|')
    assert new_snapshot(identity, 7, 2).position.next == 7


@pytest.mark.parametrize(
    "folder", ["", "ORDERS", "ORDERS/yesterday", "ORDERS/2026-11-19T10:14:30Z", "a b/2026-11-19T101430Z"]
)
def test_other_folders_are_no_identity(folder: str) -> None:
    assert StreamIdentity.of_folder(folder) is None


@pytest.mark.parametrize(
    ("identity", "first", "message"),
    [
        (StreamIdentity("ORDERS", "yesterday"), 1, "creation time"),
        (StreamIdentity("", IDENTITY.created), 1, "name of a stream"),
        (IDENTITY, 0, "first=0: expected a sequence"),
        (IDENTITY, 2**63, "first="),
    ],
)
def test_a_table_for_something_else_is_not_created(identity: StreamIdentity, first: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        new_snapshot(identity, first, 1)


def test_a_file_is_dense_if_each_sequence_has_a_row() -> None:
    assert file(1, 11).is_dense
    assert not replace(file(1, 11), rows=9).is_dense
