"""Typed tables beside an archive: every event once, whatever ends the process, and another engine reads the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import typed
from support.typed import Paid, Placed, app, message, placed, unreadable

pytest.importorskip("deltalake")

import duckdb
import pyarrow as pa
from deltalake import DeltaTable
from support.archives import archive, only_table, proved
from support.object_stores import Fault, s3_server
from typer.testing import CliRunner

from jetspark.app import App, Event
from jetspark.app.archive import TypedTables, event_table, typed_tables
from jetspark.app.columns import EventColumns
from jetspark.app.contracts.catalogue import Catalogue
from jetspark.app.contracts.field_rules import Measure
from jetspark.blocking import JetStream, connect
from jetspark.cli import commands
from jetspark.errors import ConfigError, StoreUnavailable, StreamNotFound
from jetspark.lake import ArchiveOptions, archive_streams, find_tables
from jetspark.server import NatsServer

COUNT = 40


@pytest.fixture
def js(server: NatsServer) -> Iterator[JetStream]:
    with connect(server.url) as client:
        js = client.jetstream()
        with contextlib.suppress(StreamNotFound):
            js.delete_stream(app.stream)
        asyncio.run(app.apply(server.url))
        yield js
        js.delete_stream(app.stream)


def fill(js: JetStream, first: int, last: int) -> None:
    for number in range(first, last):
        js.publish(*message(placed(number), f"placed-{number}"))
        js.publish(*message(Paid(order_id=f"o-{number % 7}", cents=number), f"paid-{number}"))


def tables_at(to: Path, catalogue: Catalogue | None = None) -> TypedTables:
    return TypedTables(app.catalogue if catalogue is None else catalogue, app.stream, str(to))


def run(js: JetStream, to: Path, tables: TypedTables, **options: Any) -> None:
    given = ArchiveOptions(to=str(to), lease_s=None, **options)
    archive_streams(js, [app.stream], given, once=True, on_commit=tables.on_commit)


def table_of(to: Path, name: str = "events/order.paid") -> DeltaTable:
    return DeltaTable(str(Path(only_table(to).uri).parent / name))


def rows_of(to: Path, name: str = "events/order.paid") -> list[dict[str, Any]]:
    rows = table_of(to, name).to_pyarrow_table().to_pylist()
    return sorted(rows, key=lambda row: row["_event"]["sequence"])


def cents(to: Path) -> list[int]:
    return [row["cents"] for row in rows_of(to)]


def test_each_type_has_a_table_with_its_events(js: JetStream, tmp_path: Path) -> None:
    js.publish("typed.elsewhere", b"foreign")
    fill(js, 0, COUNT)
    js.publish(*message(placed(1), "old", schemaversion=1, data=json.loads(typed.V1)))
    broken = {js.publish(subject, data).sequence: error for error, subject, data in unreadable()}
    tables = tables_at(tmp_path)
    run(js, tmp_path, tables)
    assert tables.errors == {}
    assert cents(tmp_path) == list(range(COUNT))
    columns = EventColumns(Placed.__contract__)
    found = rows_of(tmp_path, "events/order.placed")
    batch = pa.RecordBatch.from_pylist(found, pa.schema([each.with_nullable(True) for each in columns.schema]))
    events = columns.from_arrow(batch).events
    assert events[:-1] == [placed(number) for number in range(COUNT)]
    assert [line.sku for line in events[-1].lines] == ["a", "b"]
    assert found[0]["_event"]["id"] == "placed-0"
    assert found[0]["_event"]["sequence"] == 2
    aside = rows_of(tmp_path, "unreadable")
    assert {row["_event"]["sequence"]: row["error"] for row in aside} == broken
    assert [row["data"] for row in aside] == [js.stream(app.stream).get_message(each).data for each in broken]
    proved(only_table(tmp_path), js)
    paths = table_of(tmp_path).file_uris()
    query = "SELECT count(*), sum(cents), max(_event.sequence) FROM read_parquet($paths)"
    [row] = duckdb.connect().execute(query, {"paths": paths}).fetchall()
    assert row == (COUNT, sum(range(COUNT)), 2 * COUNT + 1)


def test_tables_follow_commits_and_catch_up_after_a_crash(
    js: JetStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed_tables, "CHUNK_ROWS", 7)  # several commits for each catching up
    expected = 0
    for number in range(6):
        fill(js, expected, expected + 5)
        expected += 5
        if number % 2:
            archive(js, app.stream, tmp_path)  # its callback was never called
        else:
            run(js, tmp_path, tables_at(tmp_path))  # a new process
            assert cents(tmp_path) == list(range(expected))
    tables_at(tmp_path).follow(only_table(tmp_path))
    assert cents(tmp_path) == list(range(expected))
    assert len(rows_of(tmp_path, "events/order.placed")) == expected


def test_a_crash_between_two_tables_doubles_nothing(
    js: JetStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed_tables, "CHUNK_ROWS", 7)
    fill(js, 0, COUNT)
    archive(js, app.stream, tmp_path)
    append, calls = event_table.EventTable.append, 0

    def dying(self: event_table.EventTable, rows: pa.Table, end: int) -> None:
        nonlocal calls
        calls += 1
        if calls % 3 == 0:
            raise KeyboardInterrupt
        append(self, rows, end)
        if calls % 5 == 0:
            raise KeyboardInterrupt

    monkeypatch.setattr(event_table.EventTable, "append", dying)
    for _ in range(100):
        try:
            tables_at(tmp_path).follow(only_table(tmp_path))
            break
        except KeyboardInterrupt:
            continue
    assert calls > 10
    assert cents(tmp_path) == list(range(COUNT))
    assert [row["visits"] for row in rows_of(tmp_path, "events/order.placed")] == list(range(COUNT))


def test_two_writers_at_once_write_each_row_once(
    js: JetStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(typed_tables, "CHUNK_ROWS", 9)
    fill(js, 0, COUNT)
    archive(js, app.stream, tmp_path)
    one, other = tables_at(tmp_path), tables_at(tmp_path)
    append = event_table.EventTable.append
    overtaken = False

    def overtaking(self: event_table.EventTable, rows: pa.Table, end: int) -> None:
        nonlocal overtaken
        if not overtaken:
            overtaken = True
            monkeypatch.setattr(typed_tables, "CHUNK_ROWS", 13)
            other.follow(only_table(tmp_path))
        append(self, rows, end)

    monkeypatch.setattr(event_table.EventTable, "append", overtaking)
    one.follow(only_table(tmp_path))
    assert overtaken
    assert cents(tmp_path) == list(range(COUNT))
    assert one.errors == other.errors == {}


def test_a_store_that_is_away_delays_typed_tables_and_not_the_archive(
    js: JetStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fill(js, 0, 5)
    tables = tables_at(tmp_path)

    def away(*_: object) -> None:
        raise StoreUnavailable("s3://lake", "503")

    with monkeypatch.context() as patch:
        patch.setattr(event_table.EventTable, "append", away)
        run(js, tmp_path, tables)
    assert "they catch up at the next commit" in caplog.text
    proved(only_table(tmp_path), js)
    fill(js, 5, 10)
    run(js, tmp_path, tables)
    assert cents(tmp_path) == list(range(10))


# ---- new versions of the application ---------------------------------------------------------------------------------


def release(fields: dict[str, Any], type: str = "order.paid") -> Catalogue:
    """Another version of the application's code: an event with other fields."""
    kind = type_of(fields, type)
    return App("typed", stream="TYPED", subjects=["typed.>"], events=[kind]).catalogue


def type_of(fields: dict[str, Any], name: str) -> type[Event]:
    annotations = {each: given[0] if isinstance(given, tuple) else given for each, given in fields.items()}
    defaults = {each: given[1] for each, given in fields.items() if isinstance(given, tuple)}
    namespace = {"__annotations__": annotations, "__module__": __name__, **defaults}
    meta: Any = type(Event)
    made: type[Event] = meta("Made", (Event,), namespace, type=name, subject="typed.*.paid".replace("*", "{order_id}"))
    return made


def test_new_fields_become_new_columns_and_new_types_new_tables(js: JetStream, tmp_path: Path) -> None:
    fill(js, 0, 3)
    run(js, tmp_path, tables_at(tmp_path, release({"order_id": str, "cents": int})))
    more = {"order_id": str, "cents": int, "currency": (str, "EUR"), "tags": (list[str], [])}
    fill(js, 3, 5)
    run(js, tmp_path, tables_at(tmp_path, release(more)))
    assert [(row["cents"], row["currency"]) for row in rows_of(tmp_path)] == [
        (0, None),
        (1, None),
        (2, None),
        (3, "EUR"),
        (4, "EUR"),
    ]
    tables_at(tmp_path).follow(only_table(tmp_path))  # with all types, and without the new columns
    assert [row["visits"] for row in rows_of(tmp_path, "events/order.placed")] == list(range(5))
    assert cents(tmp_path) == list(range(5))


def test_a_column_of_another_type_is_refused_and_the_archive_continues(
    js: JetStream, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fill(js, 0, 3)
    run(js, tmp_path, tables_at(tmp_path))
    changed = tables_at(tmp_path, release({"order_id": str, "cents": Measure[float]}))
    fill(js, 3, 5)
    run(js, tmp_path, changed)
    [error] = changed.errors.values()
    with pytest.raises(ConfigError, match=r"column cents has the type int64, and the contract says double.*remove the"):
        raise error
    proved(only_table(tmp_path), js)
    assert cents(tmp_path) == [0, 1, 2]
    uri = next(iter(changed.errors))
    for path in sorted(Path(uri).rglob("*"), reverse=True):
        path.unlink() if path.is_file() else path.rmdir()
    tables_at(tmp_path, release({"order_id": str, "cents": Measure[float]})).follow(only_table(tmp_path))
    assert cents(tmp_path) == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_a_type_without_columns_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tables_at(tmp_path)
    assert "events of type 'order.shaped' are in the raw table only: Shaped.parts" in caplog.text
    own = App("typed", stream="TYPED", subjects=["typed.>"], events=[typed.Shaped])
    with pytest.raises(ConfigError, match="no event whose fields have column types"):
        tables_at(tmp_path, own.catalogue)


def test_a_table_without_rows_keeps_its_position_in_memory_for_a_while(
    js: JetStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(4):
        js.publish(*message(Paid(order_id="o", cents=number), f"p{number}"))
    tables = tables_at(tmp_path)
    run(js, tmp_path, tables)
    assert table_of(tmp_path, "events/order.placed").version() == 0
    monkeypatch.setattr(typed_tables, "LAZY_SEQUENCES", 6)
    for number in range(4, 8):
        js.publish(*message(Paid(order_id="o", cents=number), f"p{number}"))
    run(js, tmp_path, tables)
    assert table_of(tmp_path, "events/order.placed").version() == 1
    assert (cents(tmp_path), table_of(tmp_path).version()) == (list(range(8)), 2)


# ---- object stores, and the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["503 before", "503 after", "cut before", "cut after"])
def test_a_commit_whose_outcome_is_unknown_is_made_once(js: JetStream, fault: Fault) -> None:
    fill(js, 0, 10)
    with s3_server() as s3:
        root = "s3://lake/archive"
        options = ArchiveOptions(to=root, storage_options=s3.options, lease_s=None)
        archive_streams(js, [app.stream], options, once=True)
        tables = TypedTables(app.catalogue, app.stream, root, storage_options=s3.options)
        [table] = find_tables(root, options=s3.options)
        failed = s3.failing_once("PUT", "order.paid/_delta_log/00000000000000000001", fault, times=3)
        tables.follow(table)
        assert failed
        assert tables.errors == {}
        uri = table.uri.removesuffix("/raw") + "/events/order.paid"
        rows = DeltaTable(uri, storage_options=dict(table.store.storage_options)).to_pyarrow_table().to_pylist()
        assert sorted(row["cents"] for row in rows) == list(range(10))


def test_the_command_writes_typed_tables_beside_the_archive(
    server: NatsServer, js: JetStream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JETSPARK_SERVERS", server.url)

    def run(target: str, *more: str) -> None:
        arguments = ["archive", "run", target, "--once", "--to", str(tmp_path), *more]
        result = CliRunner().invoke(commands.app, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output

    fill(js, 0, 3)
    run("support.typed:app")
    fill(js, 3, 5)
    run("support.typed:app", "--typed")
    assert cents(tmp_path) == list(range(5))
    with pytest.raises(ConfigError, match="--typed with the stream 'TYPED': expected an application, MODULE:APP"):
        run("TYPED", "--typed")
