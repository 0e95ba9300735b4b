"""Projections of an application on Spark: whatever cuts, repeats or overtakes them, the bytes are those of one process
that folds the stream from its first message to its last."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support import joined, projected
from support.projected import Dropped, app, folded, publish, stored

from jetspark import KVConfig
from jetspark.app import encode
from jetspark.app.clock import utc_now
from jetspark.app.projections.positions import FoldPosition
from jetspark.app.projections.state_header import Mark, position_key
from jetspark.app.stored_events import StoredEvent
from jetspark.blocking import JetStream, connect
from jetspark.errors import ConfigError, KeyNotFound, UsageError
from jetspark.server import NatsServer

pytest.importorskip("pyspark")

from support.spark_cluster import FLAGS, cluster
from support.spark_starts import started

from jetspark.spark import backfill, fold_states, run

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from support.sparks import Driver

pytest_plugins = ["support.sparks"]
pytestmark = [pytest.mark.timeout(600)]

NAMES = ["accounts", "totals", "recent"]


@pytest.fixture
def bank(server: NatsServer, js: JetStream) -> JetStream:
    """With an empty stream and empty buckets."""
    return projected.fresh(server.url, js)


def letters(js: JetStream) -> list[StoredEvent]:
    return [
        StoredEvent.of(message.headers, message.data)
        for message in js.stream(app.spec.dead_letter_stream).get_messages()
    ]


def lowest_position(js: JetStream) -> int:
    try:
        return min(FoldPosition.decode(js.kv(name).get(position_key()).value).sequence for name in NAMES)
    except KeyNotFound:
        return 0


def check(js: JetStream) -> None:
    for name in NAMES:
        assert stored(js, name) == folded(js, name)


def stream_all(spark: SparkSession, server: NatsServer, folder: Path, **options: object) -> None:
    query = run(app, spark, server.url, checkpoint=str(folder), until_now=True, **options)  # type: ignore[arg-type]
    query.awaitTermination()


def test_a_stream_of_micro_batches_stores_what_one_process_would_and_one_letter_for_each_unreadable_message(
    spark: SparkSession, server: NatsServer, bank: JetStream, tmp_path: Path
) -> None:
    publish(bank, projected.messages(3_000))
    stream_all(spark, server, tmp_path, maxOffsetsPerTrigger=1_000)
    check(bank)
    assert any(" parked " in (mark or "") for _, _, mark in stored(bank, "accounts").values())
    found = letters(bank)
    assert len(found) == 3
    assert {(each.handler, each.key, each.status) for each in found} == {("projections", None, "open")}
    assert {each.cause.error for each in found if each.cause} == {
        "jetspark.errors.NotJson",
        "jetspark.errors.NotAnEnvelope",
    }
    before = [bank.stream(f"KV_{name}").info().state.last_sequence for name in NAMES]
    publish(bank, projected.messages(500, seed=2, unreadable=0))
    stream_all(spark, server, tmp_path / "another", partitions=1)  # from the start, without a shuffle
    check(bank)
    assert len(letters(bank)) == 3
    after = [bank.stream(f"KV_{name}").info().state.last_sequence for name in NAMES]
    assert before[0] < after[0] < before[0] + 500


def test_a_backfill_of_ranges_stores_the_same_and_again_nothing(
    spark: SparkSession, server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(2_000))
    first = backfill(app, spark, server.url, to_sequence=900)
    assert (first.from_sequence, first.to_sequence) == (1, 900)
    assert stored(bank, "accounts") == folded(bank, "accounts", last=900)
    second = backfill("support.projected:app", spark, server.url, from_sequence=500, minPartitions=4)
    check(bank)
    assert (second.to_sequence, second.letters) == (2_000, 3)
    assert (second.from_sequence, second.known > 0) == (500, True)
    assert second.known <= 401 * 5  # messages that were folded before, with as many keys; and not all of history
    again = backfill(app, spark, server.url)
    assert (again.written, again.letters) == (0, 0)  # events of accounts that are not there are applied, for nothing
    check(bank)


def test_what_a_backfill_has_done_is_asked_of_the_leader_alone_and_then_removed(
    spark: SparkSession, server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(100))
    asked: list[bytes] = []
    with connect(server.url) as nc:
        # Any replica may answer such a request, and one that is behind says that there is no such key.
        bucket = "$JS.API.DIRECT.GET.KV_bank_projections"
        nc.subscribe(bucket, callback=lambda each: asked.append(each.data))
        nc.subscribe(f"{bucket}.>", callback=lambda each: asked.append(each.subject.encode()))
        nc.flush()
        assert backfill(app, spark, server.url).written
        with pytest.raises(KeyNotFound):
            bank.kv("bank_projections").get("the.last.one")
        while not any(b"the.last.one" in each for each in asked):
            time.sleep(0.01)
    assert [each for each in asked if b".spark." in each] == []
    assert [each for each in list(bank.kv("bank_projections").keys()) if each.startswith("spark.")] == []


@pytest.mark.parametrize(
    "options",
    [
        {"subjects": "bank.a1.>"},
        {"SUBJECTS": "bank.a1.>"},
        {"startingOffsets": "400"},
        {"endingTimestamp": "2026-03-20T10:14:30Z"},
        {"stream": "OTHER"},
        {"versions": "9,9,9"},
        {"stored": "false"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_that_say_what_is_read_are_refused_before_anything_is_folded(
    spark: SparkSession, server: NatsServer, bank: JetStream, options: dict[str, Any]
) -> None:
    publish(bank, projected.messages(100))
    for call in (run, backfill, fold_states):
        with pytest.raises(ConfigError, match=rf"option '{next(iter(options))}': .* options are .*credentialsFile"):
            call(app, spark, server.url, **options)
    assert lowest_position(bank) == 0
    assert stored(bank, "accounts") == {}


@pytest.mark.parametrize("wrong", [-1, 1.5, float("nan"), "5", True])
def test_arguments_that_are_no_numbers_are_named(
    spark: SparkSession, server: NatsServer, bank: JetStream, wrong: Any
) -> None:
    publish(bank, projected.messages(10))
    for name, call in (
        ("from_sequence", backfill),
        ("to_sequence", backfill),
        ("to_sequence", fold_states),
        ("partitions", backfill),
        ("partitions", run),
    ):
        with pytest.raises(ConfigError, match=rf"^{name}={wrong!r}: expected .*, or None for "):
            call(app, spark, server.url, **{name: wrong})
    if wrong != 1.5:
        with pytest.raises(ConfigError, match=rf"^interval_s={wrong!r}: expected seconds of 0 or more"):
            run(app, spark, server.url, interval_s=wrong)


def test_what_is_no_list_of_projections_and_what_is_no_application_is_named(
    spark: SparkSession, server: NatsServer
) -> None:
    with pytest.raises(ConfigError, match=r"projections='totals': expected a list of names, such as \['totals'\]"):
        backfill(app, spark, server.url, projections="totals")
    with pytest.raises(ConfigError, match=r"app=None: expected an App, or its name 'package.module:name'"):
        backfill(None, spark, server.url)  # type: ignore[arg-type]


def test_arguments_that_would_be_ignored_are_named(spark: SparkSession, server: NatsServer, bank: JetStream) -> None:
    bank.create_kv(KVConfig(bucket="elsewhere"))
    publish(bank, projected.messages(10))
    for wrong in (None, "", [], [""], [None], 7):
        for call in (run, backfill, fold_states):
            with pytest.raises(ConfigError, match=rf"^servers={re.escape(repr(wrong))}: expected a URL, or a list"):
                call(app, spark, wrong)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"^checkpoint='': expected a folder, or None"):
        run(app, spark, server.url, checkpoint="")
    for interval_s in (0, 5):
        with pytest.raises(ConfigError, match=rf"^interval_s={interval_s}: expected None with until_now=True"):
            run(app, spark, server.url, interval_s=interval_s, until_now=True)
    for call in (run, backfill):
        with pytest.raises(ConfigError, match=r"^buckets: 'elsewhere' for projection 'totals', which is not one of"):
            call(app, spark, server.url, projections=["accounts"], buckets={"totals": "elsewhere"})
    assert (lowest_position(bank), stored(bank, "accounts")) == (0, {})


@pytest.mark.parametrize(
    "buckets", [{"accounts": "totals"}, {"accounts": "totals", "totals": "accounts"}, dict.fromkeys(NAMES, "shared")]
)
def test_two_projections_in_one_bucket_are_refused_before_anything_is_folded(
    spark: SparkSession, server: NatsServer, bank: JetStream, buckets: dict[str, str]
) -> None:
    bank.create_kv(KVConfig(bucket="shared"))
    publish(bank, projected.messages(100))
    for call in (run, backfill):
        for only in ([], ["accounts", "totals"]):
            with pytest.raises(ConfigError, match="expected a bucket for each"):
                call(app, spark, server.url, projections=only, buckets=buckets)
    assert [*bank.kv("shared").keys(), *bank.kv("totals").keys()] == []


def test_a_backfill_into_another_bucket_does_not_ask_which_version_is_in_use(
    spark: SparkSession, server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(500))
    bank.kv("bank_projections").put("totals.bucket", b'{"bucket": "totals", "version": 9}')
    with pytest.raises(UsageError, match="is at version 9"):
        backfill(app, spark, server.url, projections=["totals"])
    bank.create_or_update_kv(KVConfig(bucket="totals-2", allow_batched=True))
    report = backfill(app, spark, server.url, projections=["totals"], buckets={"totals": "totals-2"}, letters=False)
    assert stored(bank, "totals-2") == folded(bank, "totals")
    assert stored(bank, "totals") == {}
    assert (report.buckets, report.letters, letters(bank)) == ({"totals": "totals-2"}, 0, [])
    noted = FoldPosition.decode(bank.kv("totals-2").get(position_key()).value)
    assert noted.version == app.projections["totals"].version
    bank.kv("totals-2").put(position_key(), noted._replace(version=9).encode())
    for fold in (run, backfill):
        with pytest.raises(UsageError, match=r"is at version 9 \(bucket totals-2\), and this code is version 1"):
            fold(app, spark, server.url, projections=["totals"], buckets={"totals": "totals-2"})
    bank.delete_kv("totals-2")


def test_a_stream_looks_up_what_another_projection_has_for_the_event_before(
    spark: SparkSession, server: NatsServer, js: JetStream
) -> None:
    expected = joined.publish(server.url, js, count=600)
    run(joined.app, spark, server.url, until_now=True, maxOffsetsPerTrigger=200).awaitTermination()
    assert joined.orders(js) == expected
    states = fold_states(joined.app, spark, server.url, projections=["rated_orders"]).collect()
    spec = joined.app.projections["rated_orders"]
    assert {row.key: spec.decode_state(bytes(row.value)) for row in states if row.key in expected} == expected


def test_states_folded_from_nothing_are_those_that_the_bucket_has_to_have(
    spark: SparkSession, server: NatsServer, bank: JetStream
) -> None:
    publish(bank, projected.messages(1_500))
    rows = fold_states(app, spark, server.url, projections=["accounts"], to_sequence=1_200).collect()
    found = {row.key: (None if row.value is None else bytes(row.value), row.sequence, row.parked) for row in rows}
    expected = {
        key: (value, sequence, parked_at(mark))
        for key, (value, sequence, mark) in folded(bank, "accounts", last=1_200).items()
    }
    assert found == expected
    assert any(parked for _, _, parked in found.values())
    assert stored(bank, "accounts") == {}


def parked_at(mark: str | None) -> int | None:
    read = Mark.read(mark)
    return read.parked.sequence if read is not None and read.parked is not None else None


def test_a_worker_that_is_killed_while_it_folds_changes_nothing(
    spark: SparkSession, server: NatsServer, bank: JetStream, tmp_path: Path
) -> None:
    publish(bank, projected.messages(1_000))
    flag = tmp_path / "flag"
    dropped = encode(Dropped(account="a1", flag=str(flag)), id="dropped", source="/bank", time=utc_now())
    bank.publish(dropped.subject, dropped.data)
    expected = {name: folded(bank, name) for name in NAMES}
    flag.touch()
    report = backfill(app, spark, server.url)
    assert not flag.exists()
    assert {name: stored(bank, name) for name in NAMES} == expected
    assert report.letters == 3


def test_a_server_that_is_killed_during_a_query_gets_every_event_once(spark: SparkSession, tmp_path: Path) -> None:
    with NatsServer() as own, connect(own.url) as nc:
        js = projected.fresh(own.url, nc.jetstream())
        publish(js, projected.messages(6_000, accounts=400))
        query = run(app, spark, own.url, checkpoint=str(tmp_path), until_now=True, maxOffsetsPerTrigger=1_500)
        target = js.stream("KV_accounts")
        for _ in range(2):
            before = target.info().state.last_sequence
            while query.isActive and target.info().state.last_sequence == before:
                time.sleep(0.02)
            own.kill()
            time.sleep(0.3)
            own.restart()
        query.awaitTermination()
        check(js)
        assert len(letters(js)) == 3


@pytest.mark.slow
def test_a_driver_that_is_killed_in_a_micro_batch_leaves_a_query_that_another_one_ends(
    spark: SparkSession, server: NatsServer, bank: JetStream, tmp_path: Path, drivers: Callable[..., Driver]
) -> None:
    publish(bank, projected.messages(8_000, accounts=400))
    job = {"projects": {"servers": server.url, "checkpoint": str(tmp_path / "c"), "maxOffsetsPerTrigger": 1_000}}
    driver = drivers(job)
    driver.go()
    target = bank.stream("KV_accounts")
    while target.info().state.last_sequence < 1_500:
        assert driver.is_running, driver.log()[-6000:]
        time.sleep(0.01)
    driver.kill()
    assert stored(bank, "accounts") != folded(bank, "accounts")
    stream_all(spark, server, tmp_path / "c")
    check(bank)
    assert len(letters(bank)) == 3


@pytest.mark.slow
def test_a_cluster_replays_verifies_loses_a_worker_in_a_micro_batch_and_folds_by_command_and_the_bytes_are_the_same(
    server: NatsServer, bank: JetStream, tmp_path: Path, drivers: Callable[..., Driver]
) -> None:
    publish(bank, projected.messages(6_000, accounts=400))
    with cluster(tmp_path / "cluster") as spark_cluster:
        conf = {
            "spark.master": spark_cluster.url,
            "spark.executor.cores": "1",
            "spark.executor.memory": "512m",
            "spark.executor.extraJavaOptions": FLAGS,
            "spark.sql.shuffle.partitions": "4",
        }
        job = {"projects": {"servers": server.url, "checkpoint": str(tmp_path / "c"), "maxOffsetsPerTrigger": 1_500}}
        place = ["--engine", "spark", "--master", spark_cluster.url, "--servers", server.url]
        commands = [[name, "support.projected:app", "recent", "--json", *place] for name in ("replay", "verify")]
        run_command = ["run", "support.projected:app", *place]
        driver = drivers({"commands": commands}, job, {"commands": [run_command]}, conf=conf)
        driver.go()
        target = bank.stream("KV_accounts")
        while target.info().state.last_sequence < 50:  # some tasks of the first micro-batch have stored their keys
            assert driver.is_running, driver.log()[-6000:] + spark_cluster.log()
            time.sleep(0.01)
        spark_cluster.kill_worker(0)
        assert stored(bank, "accounts") != folded(bank, "accounts")
        replayed = len(stored(bank, "recent"))
        # The query ends with the events that were there when it began. These are for `jetspark run`.
        publish(bank, projected.messages(600, accounts=400, unreadable=0, seed=2))
        last = bank.stream(app.stream).info().state.last_sequence
        while lowest_position(bank) < last:
            assert driver.is_running, driver.log()[-6000:] + spark_cluster.log()
            time.sleep(0.05)
        driver.terminate()
        driver.finish()
    assert last == 6_600
    check(bank)
    assert len(letters(bank)) == 3
    # Both workers were there, and nothing else had folded this one.
    assert f'"changed": {replayed},' in driver.log()
    assert '"equal": true' in driver.log()


@pytest.mark.slow
def test_the_command_line_folds_on_spark_until_it_is_told_to_end(server: NatsServer, bank: JetStream) -> None:
    publish(bank, projected.messages(500))
    command = [sys.executable, "-m", "jetspark", "run", "support.projected:app", "--engine", "spark"]
    process = subprocess.Popen(
        [*command, "--servers", server.url], cwd=Path(__file__).parents[1], stderr=subprocess.PIPE, text=True
    )
    try:
        while position_key() not in list(bank.kv("totals").keys()):
            assert process.poll() is None, process.stderr and process.stderr.read()
            time.sleep(0.1)
        process.send_signal(signal.SIGTERM)
        assert process.wait(250) == 0
    finally:
        process.kill()
        _, told = process.communicate()
    check(bank)
    assert not re.findall(r"Setting default log level| WARN | ERROR |Traceback", told), told


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_line_that_is_told_to_end_while_spark_starts_leaves_nothing_behind(
    server: NatsServer, bank: JetStream, tmp_path: Path, number: signal.Signals
) -> None:
    command = ["-m", "jetspark", "run", "support.projected:app", "--engine", "spark", "--servers", server.url]
    with started(tmp_path, *command) as start:
        start.wait_for_java()
        os.killpg(start.process.pid, number) if number == signal.SIGINT else start.process.send_signal(number)
        start.process.send_signal(number)  # the second one changes nothing
        _, told = start.process.communicate(timeout=250)
        assert start.process.returncode == 0, told
        assert start.left_behind() == []
    assert not re.findall(r" WARN | ERROR |Traceback", told), told
