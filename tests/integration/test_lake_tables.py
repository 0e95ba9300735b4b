"""Tables of archives, in each format and each store: one commit at a time, by one writer, and never a part of one."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("deltalake")

from support.archived import IDENTITY, append, block_at, contents, position_at, rows_in, stored, written
from support.object_stores import Fault, S3Server, s3_server

from jetspark.errors import ArchiveDamaged, ArchiveMoved, ConfigError, JetSparkError, StoreUnavailable
from jetspark.lake import cloud_store, delta_log, unknown_outcomes
from jetspark.lake.archive import FORMATS, ArchiveTable, find_tables, open_table, raw_folder
from jetspark.lake.parquet_files import read_footer, read_rows
from jetspark.lake.position import Snapshot, StreamIdentity

STORES = ("folder", "s3")


@dataclass(frozen=True)
class Place:
    """A root of an archive for one test."""

    root: str
    format: str
    options: Mapping[str, str]

    def open(self, identity: StreamIdentity = IDENTITY, **changes: Any) -> ArchiveTable:
        return open_table(self.root, identity, **({"format": self.format, "options": self.options} | changes))

    def opened(self, *, first: int = 1, epoch: int = 1) -> tuple[ArchiveTable, Snapshot]:
        table = self.open()
        return table, table.open_for_writing(first, epoch=epoch)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(autouse=True)
def no_faults(s3: S3Server) -> Iterator[None]:
    yield
    s3.fault, s3.ignores_conditions = lambda method, path: "", False


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=FORMATS)
def place(request: pytest.FixtureRequest, store: str, tmp_path: Path) -> Place:
    if store == "folder":
        return Place(str(tmp_path / "lake"), request.param, {})
    s3: S3Server = request.getfixturevalue("s3")
    return _s3_place(s3, request.param, tmp_path)


def _s3_place(s3: S3Server, format: str, tmp_path: Path) -> Place:
    options = dict(s3.options)
    if format == "iceberg":
        options["iceberg.uri"] = f"sqlite:///{tmp_path}/catalogue.db"
    return Place(f"s3://lake/{tmp_path.name}-{format}", format, options)


def sequences(table: ArchiveTable, snapshot: Snapshot) -> list[int]:
    return [message.sequence for message in rows_in(table, snapshot.files)]


# ---- one writer ------------------------------------------------------------------------------------------------------


def test_a_table_does_not_exist_until_a_writer_creates_it(place: Place) -> None:
    table = place.open()
    assert table.snapshot() is None
    assert find_tables(place.root, options=place.options) == []
    snapshot = table.open_for_writing(41, epoch=7)
    position = snapshot.position
    assert (position.identity, position.first, position.next, position.epoch) == (IDENTITY, 41, 41, 7)
    assert snapshot.files == ()
    assert place.open().snapshot() == snapshot
    # Opening it again changes nothing, whatever the first sequence would be.
    assert place.open().open_for_writing(99, epoch=8) == snapshot


def test_commits_are_read_by_others_as_they_were_written(place: Place) -> None:
    table, snapshot = place.opened()
    reader = place.open(format=None)
    assert reader.format == place.format
    for count in (10, 1, 25):
        snapshot = append(table, snapshot, count)
        assert reader.snapshot() == table.snapshot() == place.open().snapshot() == snapshot
    assert [(each.begin, each.end) for each in snapshot.files] == [(1, 11), (11, 12), (12, 37)]
    assert snapshot.position.next == 37
    assert contents(rows_in(reader, snapshot.files)) == contents(
        stored(sequence, data=b"%d" % sequence, block=block_at(sequence)) for sequence in range(1, 37)
    )


def test_a_table_of_many_commits_is_read_from_its_last_checkpoint(place: Place) -> None:
    import deltalake

    table, snapshot = place.opened()
    count = 70 if place.format == "parquet" else 10
    for _ in range(count):
        snapshot = append(table, snapshot, 1)
    if place.format == "delta":
        options = dict(table.store.storage_options)
        deltalake.DeltaTable(table.uri, storage_options=options).create_checkpoint()
        assert any(each.path.endswith("checkpoint.parquet") for each in table.store.files("_delta_log"))
        snapshot = append(table, snapshot, 1)
    assert place.open().snapshot() == snapshot
    assert sequences(table, snapshot) == list(range(1, snapshot.position.next))


def test_statistics_of_files_are_those_of_their_rows(place: Place) -> None:
    table, base = place.opened()
    files = written(table, 1, 100, missing=[1, 2, 50, 99])
    snapshot = table.log.commit(base, position_at(base, 100), add=files)
    (file,) = _current(place.open()).files
    assert (file,) == tuple(files) == snapshot.files
    assert (file.begin, file.end, file.rows, file.min_sequence, file.max_sequence) == (1, 100, 95, 3, 98)
    times = [message.time_ns // 1000 for message in rows_in(table, files) if message.time_ns]
    assert (file.min_time_us, file.max_time_us) == (min(times), max(times))
    assert [each.size_bytes for each in table.store.files() if each.path == file.path] == [file.size_bytes]
    assert not file.is_dense


def test_files_are_replaced_in_one_commit(place: Place) -> None:
    table, snapshot = place.opened()
    for _ in range(3):
        snapshot = append(table, snapshot, 10)
    before = contents(rows_in(table, snapshot.files))
    whole = written(table, 1, 21)
    after = table.log.commit(snapshot, snapshot.position, add=whole, remove=snapshot.files[:2])
    assert [(each.begin, each.end) for each in after.files] == [(1, 21), (21, 31)]
    reader = place.open()
    assert reader.snapshot() == after
    assert contents(rows_in(reader, after.files)) == before
    assert append(table, after, 5).position.next == 36


def test_files_of_no_commit_are_not_in_the_table(place: Place) -> None:
    table, snapshot = place.opened()
    snapshot = append(table, snapshot, 10)
    (orphan,) = written(table, 11, 20)
    assert orphan.path in [each.path for each in table.store.files()]
    assert place.open().snapshot() == snapshot
    assert sequences(table, append(table, snapshot, 4)) == list(range(1, 15))
    table.store.delete([orphan.path])
    table.store.delete([orphan.path])  # is gone already
    assert orphan.path not in [each.path for each in table.store.files()]


def test_the_incarnations_of_a_stream_are_tables_of_their_own(place: Place) -> None:
    table, snapshot = place.opened()
    append(table, snapshot, 10)
    later = StreamIdentity("ORDERS", "2026-12-01T00:00:00Z")
    other = StreamIdentity("AUDIT.log ä/1", "2026-12-01T00:00:00Z")
    for identity in (later, other):
        assert place.open(identity).snapshot() is None
        place.open(identity).open_for_writing(1, epoch=1)
    found = find_tables(place.root, options=place.options)
    assert [each.identity for each in found] == [other, IDENTITY, later]
    assert [_current(each).position.next for each in found] == [1, 11, 1]
    assert {each.format for each in found} == {place.format}
    assert [each.identity for each in find_tables(place.root, stream="ORDERS", options=place.options)] == [
        IDENTITY,
        later,
    ]


def test_other_engines_read_the_same_rows(place: Place, store: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import duckdb
    import polars

    table, snapshot = place.opened()
    for _ in range(3):
        snapshot = append(table, snapshot, 50, data=b"payload")
    written(table, 151, 160)  # in no commit
    locations = table.locations(snapshot)
    query = f"select count(*), sum(sequence), min(day), any_value(data) from read_parquet({locations!r})"
    if store == "folder":  # for S3, DuckDB downloads an extension
        row = duckdb.execute(query).fetchall()[0]
        assert [str(each) for each in row] == ["150", "11325", "2026-11-19", "b'payload'"]
    options = {name: value for name, value in place.options.items() if name.startswith("aws_")}
    options |= {"aws_allow_http": "true"} if options else {}
    frames = [polars.scan_parquet(locations, storage_options=options or None, hive_partitioning=True)]
    if place.format == "delta":
        frames.append(polars.scan_delta(table.uri, storage_options=options or None))
    if place.format == "iceberg":
        monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
        catalogued = _catalogue_table(place)
        frames.append(polars.scan_iceberg(catalogued, storage_options=options or None))
        (last,) = catalogued.scan(row_filter="sequence > 149").to_arrow().to_pylist()
        assert (last["day"].isoformat(), last["headers"]) == ("2026-11-19", [("A", ["150", "x"])])
    for frame in frames:
        found = frame.select(polars.len(), polars.col("sequence").sum(), polars.col("day").min().cast(polars.String))
        assert found.collect().row(0) == (150, 11325, "2026-11-19")
        (last,) = frame.filter(polars.col("sequence") == 150).collect().to_dicts()
        assert (last["subject"], last["data"]) == ("orders.o-1.paid", b"payload")
        assert last["headers"] in ({"A": ["150", "x"]}, [{"key": "A", "value": ["150", "x"]}])


def _catalogue_table(place: Place) -> Any:
    from pyiceberg.catalog import load_catalog

    options = place.options
    catalog = load_catalog(
        "jetspark",
        **{
            "uri": options.get("iceberg.uri", f"sqlite:///{place.root}/iceberg.db"),
            "s3.region": "us-east-1",
            "s3.endpoint": options.get("aws_endpoint", ""),
            "s3.access-key-id": options.get("aws_access_key_id", ""),
            "s3.secret-access-key": options.get("aws_secret_access_key", ""),
        },
    )
    ((_, name),) = catalog.list_tables("jetspark")
    assert name == "ORDERS_20261119T101430123456Z"
    return catalog.load_table(("jetspark", name))


# ---- more than one ---------------------------------------------------------------------------------------------------


def test_a_stale_base_is_refused_and_nothing_is_changed(place: Place) -> None:
    first, snapshot = place.opened()
    second = place.open()
    stale = second.snapshot()
    assert stale == snapshot
    after = append(first, snapshot, 10)
    with pytest.raises(ArchiveMoved, match="was at sequence 1 and is now at sequence 11"):
        append(second, stale, 20)
    assert second.snapshot() == first.snapshot() == after
    with pytest.raises(ArchiveMoved):
        append(first, stale, 20)
    # Also a replacement, which does not move the position, makes a base stale.
    replaced = second.log.commit(after, after.position, add=written(second, 1, 11), remove=after.files)
    with pytest.raises(ArchiveMoved):
        append(first, after, 5)
    assert sequences(first, append(first, replaced, 5)) == list(range(1, 16))


def test_a_writer_with_a_lower_epoch_is_refused(place: Place) -> None:
    table, snapshot = place.opened(epoch=5)
    snapshot = append(table, snapshot, 10, epoch=6)
    assert _current(place.open()).position.epoch == 6
    with pytest.raises(ArchiveMoved):
        append(table, snapshot, 10, epoch=5)
    assert place.open().snapshot() == snapshot


def _current(table: ArchiveTable) -> Snapshot:
    snapshot = table.snapshot()
    assert snapshot is not None
    return snapshot


def _race(works: Sequence[Callable[[], Snapshot]]) -> tuple[list[Snapshot], list[Exception]]:
    barrier = threading.Barrier(len(works))
    won: list[Snapshot] = []
    lost: list[Exception] = []

    def run(work: Callable[[], Snapshot]) -> None:
        barrier.wait(30)
        try:
            won.append(work())
        except Exception as error:
            lost.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return won, lost


def test_of_writers_that_create_a_table_at_once_one_does(place: Place) -> None:
    tables = [place.open() for _ in range(3)]
    won, lost = _race([partial(table.log.create, IDENTITY, 1, epoch=1) for table in tables])
    assert [type(each) for each in lost] == [ArchiveMoved] * 2
    (snapshot,) = won
    assert place.open().snapshot() == snapshot
    assert append(tables[0], snapshot, 10).position.next == 11


def test_of_writers_that_commit_at_once_one_does(place: Place) -> None:
    place.opened()
    tables = [place.open() for _ in range(3)]
    for number in range(4):
        bases = [_current(table) for table in tables]
        works: list[Callable[[], Snapshot]] = [
            partial(append, table, base, count)
            for count, (table, base) in enumerate(zip(tables, bases, strict=True), start=1)
        ]
        won, lost = _race(works)
        assert [type(each) for each in lost] == [ArchiveMoved] * 2, lost
        (snapshot,) = won
        assert [table.snapshot() for table in tables] == [snapshot] * 3
        assert len(snapshot.files) == number + 1
    assert sequences(tables[0], snapshot) == list(range(1, snapshot.position.next))


RACER = """
import json, sys
sys.path.insert(0, sys.argv[1])
from support.archived import IDENTITY, append
from jetspark.errors import ArchiveMoved
from jetspark.lake.archive import open_table

root, format, options, number = sys.argv[2], sys.argv[3], json.loads(sys.argv[4]), int(sys.argv[5])
table = open_table(root, IDENTITY, format=format, options=options)
won = lost = 0
while (base := table.snapshot()).position.next < 50:
    try:
        append(table, base, number, data=b"writer %d" % number)
        won += 1
    except ArchiveMoved:
        lost += 1
print(won, lost)
"""


@pytest.mark.slow
def test_processes_that_commit_at_once_leave_each_sequence_once(place: Place) -> None:
    table, _ = place.opened()
    tests = str(Path(__file__).parents[1])
    arguments = [sys.executable, "-c", RACER, tests, place.root, place.format, json.dumps(dict(place.options))]
    racers = [
        subprocess.Popen([*arguments, str(number)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for number in (2, 3)
    ]
    outcomes = [(racer.communicate(timeout=200), racer.returncode) for racer in racers]
    assert [code for _, code in outcomes] == [0, 0], outcomes
    won = {number: int(output.split()[0]) for number, ((output, _), _) in zip((2, 3), outcomes, strict=True)}
    snapshot = table.snapshot()
    assert snapshot is not None
    rows = rows_in(table, snapshot.files)
    assert [each.sequence for each in rows] == list(range(1, snapshot.position.next))
    commits = {number: len([each for each in snapshot.files if each.rows == number]) for number in (2, 3)}
    assert commits == won


# ---- outcomes that are unknown ---------------------------------------------------------------------------------------

COMMITS = {"delta": "_delta_log/0000", "parquet": "_jetspark/manifest-"}
"""By format: paths of the objects that are commits. Those of Iceberg are in a catalogue."""


@pytest.fixture
def s3_place(request: pytest.FixtureRequest, s3: S3Server, tmp_path: Path) -> Place:
    return _s3_place(s3, request.param, tmp_path)


@pytest.fixture
def s3_table(s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ArchiveTable:
    """A table with one file, in a store that is not asked again for long."""
    monkeypatch.setattr(cloud_store, "MAX_RETRIES", 1)
    table, snapshot = _s3_place(s3, "parquet", tmp_path).opened()
    append(table, snapshot, 10)
    return table


@pytest.mark.parametrize("fault", ["409 before", "503 before", "503 after", "cut before", "cut after"])
@pytest.mark.parametrize("s3_place", COMMITS, indirect=True)
def test_a_commit_whose_answer_is_lost_is_done_once(s3_place: Place, s3: S3Server, fault: Fault) -> None:
    failed = s3.failing_once("PUT", COMMITS[s3_place.format], fault)
    table, snapshot = s3_place.opened()
    assert len(failed) == 1
    for count in (10, 20):
        failed = s3.failing_once("PUT", COMMITS[s3_place.format], fault)
        snapshot = append(table, snapshot, count)
        assert len(failed) == 1
        assert table.snapshot() == s3_place.open().snapshot() == snapshot
    assert sequences(table, snapshot) == list(range(1, 31))
    assert len(snapshot.files) == 2


@pytest.mark.parametrize("fault", ["503 after", "cut after"])
@pytest.mark.parametrize("s3_place", COMMITS, indirect=True)
def test_a_commit_that_loses_its_race_during_a_fault_is_refused(s3_place: Place, s3: S3Server, fault: Fault) -> None:
    table, snapshot = s3_place.opened()
    other = s3_place.open()
    theirs = append(other, snapshot, 7)
    failed = s3.failing_once("PUT", COMMITS[s3_place.format], fault)
    with pytest.raises(ArchiveMoved, match="is now at sequence 8"):
        # From the version that this table has read: the other commit shows only when the log refuses.
        append(table, snapshot, 10)
    assert failed or s3_place.format == "delta"
    assert s3_place.open().snapshot() == theirs


@pytest.mark.parametrize("s3_place", COMMITS, indirect=True)
def test_a_store_that_stays_away_is_an_error_that_may_pass(
    s3_place: Place, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cloud_store, "MAX_RETRIES", 1)
    monkeypatch.setattr(delta_log, "MAX_RETRIES", 1)
    monkeypatch.setattr(unknown_outcomes, "ATTEMPTS", 2)
    table, snapshot = s3_place.opened()
    (file,) = written(table, 1, 11)
    s3.failing_once("PUT", COMMITS[s3_place.format], "cut before", times=100)
    with pytest.raises(StoreUnavailable) as caught:
        table.log.commit(snapshot, position_at(snapshot, 11), add=[file])
    assert caught.value.may_pass
    s3.failing_once("GET", "", "503 before", times=1000)
    with pytest.raises(StoreUnavailable):
        s3_place.open(format=None).snapshot()
    s3.fault = lambda method, path: ""
    assert table.snapshot() == snapshot
    assert sequences(table, table.log.commit(snapshot, position_at(snapshot, 11), add=[file])) == list(range(1, 11))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("s3_place", "fault"),
    [
        *((format, fault) for format in COMMITS for fault in ("503 before", "503 after", "cut before", "cut after")),
        ("iceberg", "cut after"),  # its library waits long before it tries again
    ],
    indirect=["s3_place"],
)
def test_any_request_may_fail_once(s3_place: Place, s3: S3Server, fault: Fault) -> None:
    """Every third request fails, whatever it is; the one after it is the library's next attempt."""
    count = 0

    def choose(method: str, path: str) -> Fault:
        nonlocal count
        count += 1
        return fault if count % 3 == 0 else ""

    s3.fault = choose
    table, snapshot = s3_place.opened()
    for _ in range(3):
        snapshot = append(table, snapshot, 100, data=b"x" * 1000)
    reader = s3_place.open()
    assert reader.snapshot() == snapshot
    assert sequences(reader, snapshot) == list(range(1, 301))
    assert count > 30


def test_a_data_file_that_is_missing_is_an_error(place: Place) -> None:
    table, snapshot = place.opened()
    snapshot = append(table, snapshot, 10)
    (file,) = snapshot.files
    table.store.delete([file.path])
    for reading in (lambda: list(read_rows(table.store, file)), lambda: read_footer(table.store, file)):
        with pytest.raises(ArchiveDamaged, match=r"file day=2026-11-19/0.* is missing"):
            reading()


def test_a_data_file_that_cannot_be_reached_is_an_error_that_may_pass(s3_table: ArchiveTable, s3: S3Server) -> None:
    (file,) = _current(s3_table).files
    failed = s3.failing_once("GET", ".parquet", "503 before", times=1000)
    with pytest.raises(StoreUnavailable) as caught:
        list(read_rows(s3_table.store, file))
    assert caught.value.may_pass
    assert failed


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_table_of_another_format_is_refused(place: Place) -> None:
    place.opened()
    (other,) = [each for each in ("delta", "parquet") if each != place.format][:1]
    with pytest.raises(ConfigError, match=rf"format '{other}'.*has the format '{place.format}'"):
        place.open(format=other)
    with pytest.raises(ConfigError, match="format 'orc': expected delta, parquet"):
        place.open(format="orc")


@pytest.mark.parametrize("format", COMMITS)
def test_a_table_that_was_moved_to_another_stream_is_refused(tmp_path: Path, format: str) -> None:
    place = Place(str(tmp_path), format, {})
    table, _ = place.opened()
    other = StreamIdentity("OTHER", IDENTITY.created)
    target = Path(place.root, raw_folder(other))
    target.parent.mkdir(parents=True)
    Path(table.uri).rename(target)
    with pytest.raises(ArchiveDamaged, match=r"stream='ORDERS'.*stream='OTHER'.* was expected"):
        place.open(other).snapshot()
    with pytest.raises(ArchiveDamaged, match="was moved or copied"):
        place.open(other).open_for_writing(1, epoch=9)


def test_a_folder_with_other_files_is_refused(place: Place) -> None:
    table = place.open()
    table.store.put("data/part-0.parquet", b"x")
    with pytest.raises(ConfigError, match=r"has the folder 'data', which no archive has; give another root"):
        place.open()


def test_data_files_without_a_log_are_not_an_empty_table(place: Place) -> None:
    table, snapshot = place.opened()
    append(table, snapshot, 10)
    table.store.delete([each.path for each in table.store.files() if not each.path.startswith("day=")])
    with pytest.raises(ArchiveDamaged, match=r"has data files and no log|pyiceberg cannot use it"):
        place.opened()


def test_an_archive_may_have_tables_of_several_formats(tmp_path: Path) -> None:
    for number, format in enumerate(FORMATS):
        identity = StreamIdentity(f"S{number}", IDENTITY.created)
        open_table(str(tmp_path), identity, format=format).open_for_writing(1, epoch=1)
    options = {"iceberg.uri": f"sqlite:///{tmp_path}/iceberg.db"}
    for found in (find_tables(str(tmp_path)), find_tables(str(tmp_path), options=options)):
        assert [each.format for each in found] == list(FORMATS)
        assert [_current(each).position.next for each in found] == [1, 1, 1]


def test_a_delta_table_that_is_not_ours_is_refused(tmp_path: Path) -> None:
    import deltalake
    import pyarrow as pa

    folder = tmp_path / raw_folder(IDENTITY)
    deltalake.write_deltalake(folder, pa.table({"id": [1]}))
    with pytest.raises(ArchiveDamaged, match="not one that JetSpark has made"):
        open_table(str(tmp_path), IDENTITY).snapshot()


@pytest.mark.parametrize("damage", ["junk", "[]", "{}"])
def test_a_log_that_cannot_be_read_is_an_error(place: Place, damage: str) -> None:
    if place.format == "delta" and damage == "{}":
        damage = '{"add": {}}'  # an object without an action is a commit of nothing to delta-rs
    table, snapshot = place.opened()
    append(table, snapshot, 10)
    folder, end = {"delta": ("_delta_log", "01.json"), "parquet": ("_jetspark", "01.json")}.get(
        place.format, ("metadata", ".metadata.json")
    )
    for each in [each.path for each in table.store.files(folder) if each.path.endswith(end)]:
        table.store.put(each, damage.encode())
    with pytest.raises(ArchiveDamaged) as caught:
        place.open().snapshot()
    assert table.uri in str(caught.value)


def test_a_missing_manifest_is_an_error_and_not_an_older_table(tmp_path: Path) -> None:
    place = Place(str(tmp_path), "parquet", {})
    table, snapshot = place.opened()
    for _ in range(3):
        snapshot = append(table, snapshot, 10)
    table.store.delete([f"_jetspark/manifest-{2:020}.json"])
    with pytest.raises(ArchiveDamaged, match=r"manifest-0*2\.json is missing"):
        place.open().snapshot()
    table.store.delete([f"_jetspark/manifest-{each:020}.json" for each in range(4)])
    with pytest.raises(ArchiveDamaged, match=r"manifest-0*0\.json is missing"):
        place.open().snapshot()


def test_files_that_another_program_removed_from_the_table_are_an_error(tmp_path: Path) -> None:
    import deltalake

    place = Place(str(tmp_path), "delta", {})
    table, snapshot = place.opened()
    append(table, append(table, snapshot, 10), 10)
    deltalake.DeltaTable(table.uri).optimize.compact()
    with pytest.raises(ArchiveDamaged, match=r"another program has added files.*restore an older version"):
        place.open().snapshot()


def test_a_store_without_conditional_writes_is_refused(s3: S3Server, tmp_path: Path) -> None:
    s3.ignores_conditions = True
    for format in COMMITS:
        place = Place(f"s3://lake/{tmp_path.name}-{format}", format, s3.options)
        with pytest.raises(ConfigError, match=r"does not honour conditional writes.*use one that does"):
            place.opened()
        assert place.open().snapshot() is None
        assert list(place.open().store.files()) == []


def test_iceberg_in_an_object_store_needs_a_catalogue(s3: S3Server) -> None:
    table = open_table("s3://lake/none", IDENTITY, format="iceberg", options=s3.options)
    with pytest.raises(ConfigError, match=r"give the option iceberg.catalog.*such as iceberg.uri"):
        table.open_for_writing(1, epoch=1)
    options = s3.options | {"iceberg.catalog": "nowhere"}
    with pytest.raises(ConfigError, match=r"catalogue 'nowhere'"):
        open_table("s3://lake/none", IDENTITY, format="iceberg", options=options).open_for_writing(1, epoch=1)


def test_an_iceberg_table_is_not_taken_for_an_empty_one_in_another_catalogue(tmp_path: Path) -> None:
    table, snapshot = Place(str(tmp_path), "iceberg", {}).opened()
    append(table, snapshot, 10)
    other = Place(str(tmp_path), "iceberg", {"iceberg.uri": f"sqlite:///{tmp_path}/other.db"})
    with pytest.raises(ArchiveDamaged, match="its files are there; give its catalogue"):
        other.opened()


def test_a_creation_that_was_cut_short_is_done_again(tmp_path: Path) -> None:
    place = Place(str(tmp_path), "iceberg", {})
    place.open().store.put("metadata/00000-of-a-killed-writer.metadata.json", b"{")
    assert place.open().snapshot() is None
    _, snapshot = place.opened()
    assert place.open().snapshot() == snapshot


@pytest.mark.parametrize("landed", [False, True], ids=["refused", "done"])
def test_an_iceberg_commit_whose_answer_is_lost_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """The catalogue's answer is lost; nothing else is known."""
    from pyiceberg.catalog.sql import SqlCatalog

    table, snapshot = Place(str(tmp_path), "iceberg", {}).opened()
    real, failed = SqlCatalog.commit_table, list[bool]()

    def commit_table(*arguments: Any) -> Any:
        if landed or failed:
            answer = real(*arguments)
        if not failed:
            failed.append(True)
            raise ConnectionError("the connection was reset")
        return answer

    monkeypatch.setattr(SqlCatalog, "commit_table", commit_table)
    snapshot = append(table, snapshot, 10)
    assert failed
    assert sequences(table, append(table, snapshot, 5)) == list(range(1, 16))
    assert len(_current(table).files) == 2


def test_an_iceberg_table_whose_retries_were_turned_on_is_refused(tmp_path: Path) -> None:
    place = Place(str(tmp_path), "iceberg", {})
    _, snapshot = place.opened()
    with _catalogue_table(place).transaction() as transaction:
        transaction.set_properties({"commit.retry.num-retries": "4"})
    with pytest.raises(ArchiveDamaged, match="must be 0: set it to 0"):
        append(place.open(), snapshot, 10)


def test_secrets_are_in_no_text(s3: S3Server, caplog: pytest.LogCaptureFixture) -> None:
    options = s3.options | {"aws_secret_access_key": "very-secret-key", "aws_session_token": "very-secret-token"}
    table = open_table("s3://lake/secrets", IDENTITY, format="delta", options=options)
    texts = [repr(table), repr(table.store), repr(table.log), repr(table.store.below("x")), str(table.snapshot())]
    texts += [table.uri, table.store.location("x")]
    for bad in (
        lambda: open_table("s3://no-such-bucket/x", IDENTITY, options=options),
        lambda: open_table("s3://lake/x", IDENTITY, options=options | {"very_wrong": "very-secret-option"}),
        lambda: open_table("s3://user:very-secret-password@lake/x", IDENTITY, options=options),
        lambda: open_table("s3://lake/x?sig=very-secret-signature", IDENTITY, options=options),
        lambda: open_table("/tmp/lake", IDENTITY, options=options),
        lambda: open_table("s3://no-such-bucket/x", IDENTITY, format="delta", options=options).open_for_writing(
            1, epoch=1
        ),
    ):
        with pytest.raises(JetSparkError) as caught:
            bad()
        texts += [str(caught.value), repr(caught.value), str(caught.value.__cause__)]
        assert caught.value.__cause__ is not None or caught.value.__suppress_context__ or not caught.value.__context__
    assert len(texts) > 20
    assert "very-secret" not in "\n".join([*texts, caplog.text])
