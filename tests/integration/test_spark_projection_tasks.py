"""What Spark's tasks do for projections, done here in one process and in any order: no Spark is started."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any
from zlib import crc32

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from support import joined, projected
from support.projected import app, folded, publish, stored
from support.stale import StaleLoads, stale_loads

from jetspark.app.projections.live_options import LiveOptions
from jetspark.app.projections.positions import FoldPosition, position_change
from jetspark.app.projections.state_header import position_key
from jetspark.app.stored_events import StoredEvent
from jetspark.blocking import JetStream
from jetspark.blocking.steps import ProcedureRunner
from jetspark.errors import Conflict, UsageError
from jetspark.server import NatsServer
from jetspark.state.changes import Change, Current
from jetspark.state.store import StateBucket, load, store

pytest.importorskip("pyspark")

from jetspark.spark.engine.projection_options import FORMAT, ProjectionOptions
from jetspark.spark.engine.projection_sink import Projected, finish, folded_rows, write_rows
from jetspark.spark.engine.projection_source import ProjectionBatchReader, ProjectionStreamReader
from jetspark.spark.engine.rows import base_rows
from jetspark.spark.options import read_options

pytest_plugins = ["support.sparks"]

NAMES = ["accounts", "totals", "recent"]


@pytest.fixture
def bank(server: NatsServer, js: JetStream) -> JetStream:
    """With an empty stream and empty buckets."""
    return projected.fresh(server.url, js)


class Batch:
    """A write of a range, as Spark would do it: planned, read, brought together, written, finished."""

    def __init__(
        self,
        server: NatsServer,
        first: int,
        last: int,
        *,
        tasks: int = 3,
        rows_before: Sequence[pa.RecordBatch] = (),
        **more: str,
    ) -> None:
        given = {
            "servers": server.url,
            "app": "support.projected:app",
            "stream": app.stream,
            "projections": ",".join(NAMES),
            "buckets": ",".join(NAMES),
            "subjects": "bank.*.opened,bank.*.moved,bank.*.closed,bank.*.dropped",
            "startingOffsets": "earliest" if first == 1 else str(first),
            "endingOffsets": str(last + 1),
            "maxRecordsPerPartition": "300",
            **more,
        }
        self.options = read_options(ProjectionOptions, FORMAT, given)
        reader = ProjectionBatchReader(self.options)
        rows = [batch for each in reader.partitions() for batch in reader.read(each)]
        table = pa.Table.from_batches([*rows_before, *rows])
        lanes = zip(table["target"].to_pylist(), table["key"].to_pylist(), strict=True)
        place = pa.array([crc32(f"{target} {key}".encode()) % tasks for target, key in lanes])
        self.tasks = [table.filter(pc.equal(place, number)).to_batches(max_chunksize=100) for number in range(tasks)]

    def write(self, number: int) -> Projected:
        batches = list(self.tasks[number])
        random.Random(number).shuffle(batches)  # a shuffle keeps no order
        return write_rows(self.options, iter(batches))

    def all(self) -> list[Projected]:
        done = [self.write(number) for number in range(len(self.tasks))]
        finish(self.options, list(done))
        return done


def check(js: JetStream, last: int | None = None) -> None:
    for name in NAMES:
        assert stored(js, name) == folded(js, name, last=last)


def position(js: JetStream, bucket: str) -> int:
    return FoldPosition.decode(js.kv(bucket).get(position_key()).value).sequence


@pytest.mark.parametrize("asked", ["", "bank.>"])
def test_a_stream_asks_the_server_for_what_was_chosen_and_names_the_events_in_its_offsets(
    asked: str, server: NatsServer, bank: JetStream
) -> None:
    """Several filters with wildcards would have the server look for each message, a hundred times as long."""
    publish(bank, projected.messages(200))
    events = "bank.*.opened,bank.*.moved,bank.*.closed,bank.*.dropped"
    given = {
        "servers": server.url,
        "app": "support.projected:app",
        "stream": app.stream,
        "projections": ",".join(NAMES),
        "buckets": ",".join(NAMES),
        "events": events,
        "startingOffsets": "earliest",
    }
    reader = ProjectionStreamReader(
        read_options(ProjectionOptions, FORMAT, given | ({"subjects": asked} if asked else {}))
    )
    start = reader.initialOffset()
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert sorted(end["subjects"]) == sorted(events.split(","))
    planned = reader.partitions(start, end)
    assert {part.value[0].subjects for part in planned} == {tuple(filter(None, [asked]))}
    assert sum(batch.num_rows for part in planned for batch in reader.read(part)) > 200


def test_any_order_of_batches_and_tasks_with_repeats_and_half_done_ones_stores_the_same_bytes(
    server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(2_000))
    half = Batch(server, 1, 900)
    half.write(1)  # and then the driver dies
    Batch(server, 1, 700).all()
    check_prefix = stored(bank, "accounts")
    assert check_prefix  # keys of the task that was done are beyond 700, the others are not
    half.all()
    check(bank, 900)
    assert [position(bank, name) for name in NAMES] == [900] * 3
    late = Batch(server, 601, 1_500)
    Batch(server, 901, 2_000).all()
    late.all()  # planned before, stored afterwards: the buckets are beyond it
    check(bank)
    assert [position(bank, name) for name in NAMES] == [2_000] * 3
    assert any(" parked " in (mark or "") for _, _, mark in stored(bank, "accounts").values())
    letters = [
        StoredEvent.of(each.headers, each.data) for each in bank.stream(app.spec.dead_letter_stream).get_messages()
    ]
    assert [(each.handler, each.key, each.status) for each in letters] == [("projections", None, "open")] * 3


def test_a_key_that_another_engine_writes_between_load_and_store_is_folded_again(
    server: NatsServer, bank: JetStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(bank, projected.messages(1_000))
    slow, fast = Batch(server, 1, 1_000, tasks=1), Batch(server, 1, 600, tasks=1)
    store_all = StateBucket.store_all
    calls: list[str] = []

    def overtaken(self: StateBucket, changes: list[Change], **options: Any) -> Any:
        if not calls:
            calls.append(self.name)
            fast.all()
        return store_all(self, changes, **options)

    monkeypatch.setattr(StateBucket, "store_all", overtaken)
    [done] = slow.all()
    check(bank)
    assert done.counts["written"] >= len(stored(bank, "accounts"))


def fold_on_answers_of_the_past(server: NatsServer, bank: JetStream, *, is_believed: bool) -> StaleLoads:
    """Batch after batch; some keys have no state, some are deleted, and some are parked."""
    publish(bank, projected.messages(1_500))
    Batch(server, 1, 500).all()
    with stale_loads(is_believed=is_believed) as counts:
        for first in range(501, 1_500, 200):
            Batch(server, first, min(first + 199, 1_500)).all()
    return counts


def test_loads_that_replicas_answer_with_the_past_change_nothing(server: NatsServer, bank: JetStream) -> None:
    counts = fold_on_answers_of_the_past(server, bank, is_believed=False)
    assert counts.stale > 10
    check(bank)
    assert [position(bank, name) for name in NAMES] == [1_500] * 3


def test_who_believes_any_replica_passes_events_by(server: NatsServer, bank: JetStream) -> None:
    """What the test above is for: without the guard this very course of events loses some in silence."""
    fold_on_answers_of_the_past(server, bank, is_believed=True)
    assert stored(bank, "accounts") != folded(bank, "accounts")
    assert [position(bank, name) for name in NAMES] == [1_500] * 3


def test_a_task_that_has_loaded_what_is_older_than_the_plan_moves_no_position(
    server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(300))
    Batch(server, 1, 100).all()
    batch = Batch(server, 101, 300, tasks=1)
    done = batch.write(0)
    late = dataclasses.replace(done, seen=[1, *done.seen[1:]])  # as a leader says that was replaced long ago
    with pytest.raises(Conflict, match="accounts"):
        finish(batch.options, [late])
    assert [position(bank, name) for name in NAMES] == [100] * 3
    finish(batch.options, [done])
    assert [position(bank, name) for name in NAMES] == [300] * 3


def test_a_batch_that_begins_behind_what_a_bucket_has_is_refused(server: NatsServer, bank: JetStream) -> None:
    publish(bank, projected.messages(500))
    Batch(server, 1, 200).all()
    with pytest.raises(UsageError, match=r"bucket accounts has everything up to sequence 200.* leave out 201 to 300"):
        Batch(server, 301, 500)
    Batch(server, 201, 500).all()
    check(bank)


def test_a_repair_during_a_batch_keeps_its_position(server: NatsServer, bank: JetStream) -> None:
    publish(bank, projected.messages(500))
    Batch(server, 1, 200).all()
    batch = Batch(server, 201, 500)
    entry = bank.kv("accounts").get(position_key())
    repaired = FoldPosition.decode(entry.value).repaired(150)
    ProcedureRunner(bank).run(store("accounts", [position_change(repaired, entry.revision)]))
    batch.all()
    assert [position(bank, name) for name in NAMES] == [150, 500, 500]
    with pytest.raises(UsageError, match="up to sequence 150"):
        Batch(server, 201, 500)


def test_a_state_of_another_version_is_refused_and_a_foreign_value_is_left_alone(
    server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(300))
    bank.kv("accounts").put("a1", b"mine")
    Batch(server, 1, 300).all()
    assert bank.kv("accounts").get("a1").value == b"mine"
    expected = folded(bank, "accounts")
    del expected["a1"]
    found = {key: state for key, state in stored(bank, "accounts").items() if key != "a1"}
    assert found == expected
    present = ProcedureRunner(bank).run(load("totals", ["all"]))["all"]
    other = Change("all", b"[1]", "put", 299, present.revision, mark="2")
    ProcedureRunner(bank).run(store("totals", [other]))
    with pytest.raises(UsageError, match="made by its version 2, and this is version 1"):
        Batch(server, 1, 300).all()


def test_a_bucket_of_another_version_is_refused_before_anything_is_read_into_it(
    server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(200))
    Batch(server, 1, 100, versions="1,1,1").all()
    noted = FoldPosition.decode(bank.kv("totals").get(position_key()).value)
    assert (noted.sequence, noted.version) == (100, 1)
    before = bank.stream("KV_totals").info().state.last_sequence
    with pytest.raises(UsageError, match=r"'totals' is at version 1 .*, and this code is version 2: rebuild it"):
        Batch(server, 101, 200, versions="1,2,1")
    late = Batch(server, 101, 200, versions="1,1,1")
    bank.kv("totals").put(position_key(), noted._replace(version=2).encode())  # rebuilt meanwhile, say
    with pytest.raises(UsageError, match="is at version 2"):
        late.all()
    assert FoldPosition.decode(bank.kv("totals").get(position_key()).value) == noted._replace(version=2)
    assert before < bank.stream("KV_totals").info().state.last_sequence


def test_a_swapped_projection_ends_a_query_that_would_go_on_in_the_old_bucket(
    server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(100))
    Batch(server, 1, 50, records="bank_projections").all()
    bank.kv("bank_projections").put("totals.bucket", b'{"bucket": "totals-2", "version": 1}')
    with pytest.raises(UsageError, match="'totals' was swapped from bucket totals to totals-2"):
        Batch(server, 51, 100, records="bank_projections")
    # One whose bucket was chosen stays there; the others are looked after all the same.
    with pytest.raises(UsageError, match="'totals' was swapped"):
        Batch(server, 51, 100, records="bank_projections", placed="accounts")
    Batch(server, 51, 100, records="bank_projections", placed="totals").all()


def test_a_message_too_large_for_its_letter_has_a_letter_without_it(server: NatsServer, bank: JetStream) -> None:
    bank.publish("bank.a.moved", b"x" * (bank_limit(bank) - 10))
    bank.publish("bank.b.moved", b"y")
    Batch(server, 1, 2).all()
    letters = [
        StoredEvent.of(each.headers, each.data) for each in bank.stream(app.spec.dead_letter_stream).get_messages()
    ]
    assert sorted((each.origin.sequence, each.is_body_omitted) for each in letters) == [(1, True), (2, False)]


def test_a_stream_that_is_made_anew_under_a_write_ends_it_before_a_position_is_noted(
    server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(300))
    Batch(server, 1, 100).all()
    batch = Batch(server, 101, 200)
    config = bank.stream(app.stream).info().config
    bank.delete_stream(app.stream)
    bank.create_stream(config)
    publish(bank, projected.messages(300, seed=2))
    with pytest.raises(
        UsageError,
        match=r"bucket accounts\) was made of stream .BANK. as it was .* is not valid",
    ):
        batch.all()
    assert [position(bank, name) for name in NAMES] == [100] * 3
    with pytest.raises(
        UsageError,
        match=r"bucket accounts\) was made of stream .BANK. as it was .* is not valid",
    ):
        Batch(server, 101, 200)


def test_keys_are_folded_on_from_the_states_among_the_rows_and_others_are_left_out(
    server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(1_000))
    early, late = folded(bank, "accounts", last=300), folded(bank, "accounts")
    some = sorted(early)[:8]
    bases = {key: Current(value, at, 7, mark=mark) for key, (value, at, mark) in early.items() if key in some}
    nothing = next(key for key in sorted(late) if key not in some)
    bases[nothing] = Current(None, 0, 0)
    found: dict[str, Any] = {}
    only: dict[str, Any] = {"projections": "accounts", "buckets": "accounts", "stored": "false"}
    batch = Batch(server, 1, 1_000, rows_before=base_rows(bases).to_batches(), **only)
    for number in range(len(batch.tasks)):
        for piece in folded_rows(batch.options, iter(batch.tasks[number])):
            found |= {row["key"]: (row["value"], row["sequence"], row["mark"]) for row in piece.to_pylist()}
    assert found == {key: late[key] for key in [*some, nothing]}
    assert any(" parked " in mark for _, _, mark in found.values())
    assert stored(bank, "accounts") == {}


def bank_limit(js: JetStream) -> int:
    return 1 << 20


@contextlib.contextmanager
def live(server: NatsServer) -> Iterator[None]:
    """The live engine, in a thread."""
    loop = asyncio.new_event_loop()
    running = loop.create_task(app.run(server.url, live=LiveOptions(position_every_s=0.05)))
    thread = threading.Thread(target=lambda: loop.run_until_complete(asyncio.wait([running])))
    thread.start()
    try:
        yield
    finally:
        loop.call_soon_threadsafe(running.cancel)
        thread.join()
        loop.close()
    if not running.cancelled() and (error := running.exception()) is not None:
        raise error


def test_the_live_engine_and_tasks_of_spark_at_the_same_time_store_the_same_bytes(
    server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(1_500))
    before = Batch(server, 1, 1_500)
    with live(server):
        before.all()
        for seed in range(2, 5):
            publish(bank, projected.messages(400, seed=seed, unreadable=0))
            last = bank.stream(app.stream).info().state.last_sequence
            Batch(server, 1, last - 200).all()
        while min(position(bank, name) for name in NAMES) < last:
            time.sleep(0.02)
    check(bank)
    letters = [
        StoredEvent.of(each.headers, each.data) for each in bank.stream(app.spec.dead_letter_stream).get_messages()
    ]
    assert len(letters) == 3
    # And Spark goes on where the live engine was.
    publish(bank, projected.messages(300, seed=9, unreadable=0))
    Batch(server, last + 1, last + 300).all()
    check(bank)
    with live(server):
        publish(bank, projected.messages(100, seed=10, unreadable=0))
        while min(position(bank, name) for name in NAMES) < last + 400:
            time.sleep(0.02)
    check(bank)


def test_a_lookup_is_as_of_the_event_before_whatever_tasks_do(server: NatsServer, js: JetStream) -> None:
    expected = joined.publish(server.url, js, count=600)
    more = {
        "app": "support.joined:app",
        "stream": "JOINED",
        "projections": "ratings,rated_orders",
        "buckets": "ratings,rated_orders",
        "subjects": "joined.*.rated,joined.*.ordered",
    }
    for first, last in ((1, 250), (100, 400), (1, 250), (401, 600)):  # what was read once more changes nothing
        Batch(server, first, last, tasks=3, **more).all()
    assert joined.orders(js) == expected
