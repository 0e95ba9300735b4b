"""Object stores: what both drivers promise, on a real server and beside another client."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import math
import os
import random
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.drivers import Driver, inside, on_both_drivers
from support.patience import PATIENCE_S

import jetspark
from jetspark.jetstream.objects import READ_AHEAD_BYTES, WINDOW_BYTES, ObjectMeta, ObjectStoreConfig
from jetspark.server import NatsServer

CHUNK = 1000


def _content(size_bytes: int) -> bytes:
    return random.Random(size_bytes).randbytes(size_bytes)


def _pieces(data: bytes, error: Exception | None = None) -> Iterator[bytes]:
    yield from (data[start : start + 777] for start in range(0, len(data), 777))
    if error is not None:
        raise error


async def _async_pieces(data: bytes, error: Exception | None = None) -> AsyncIterator[bytes]:
    for piece in _pieces(data, error):
        await asyncio.sleep(0)
        yield piece


async def _collect(items: AsyncIterator[Any], count: int | None = None) -> list[Any]:
    taken = []
    async with asyncio.timeout(30):
        async for item in items:
            taken.append(item)
            if len(taken) == count:
                break
    return taken


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


async def _subjects(js: jetspark.JetStream, bucket: str) -> dict[str, int]:
    """Messages per subject in the stream behind a bucket."""
    stream = await js.stream(f"OBJ_{bucket}")
    return dict((await stream.info(subjects_filter=">")).state.subjects)


async def _chunk_subjects(js: jetspark.JetStream, bucket: str) -> dict[str, int]:
    return {name: count for name, count in (await _subjects(js, bucket)).items() if ".C." in name}


WAYS = pytest.mark.parametrize("way", ["fast", "plain"])


async def _store(js: jetspark.JetStream, way: str, config: ObjectStoreConfig | str = "files") -> Any:
    """A bucket that takes its chunks over fast ingest, or one as other clients make it."""
    config = ObjectStoreConfig.of(config)
    if way == "plain":
        await js.create_stream(config.to_stream())
        return await js.object_store(config.bucket)
    store = await js.create_object_store(config)
    assert (await store.status()).stream.config.allow_batched
    return store


SIZES = [0, 1, CHUNK, 10 * CHUNK, 10 * CHUNK + 1]


@on_both_drivers
@WAYS
async def test_every_size_from_every_kind_of_source_comes_back(
    driver: Driver, url: str, tmp_path: Path, way: str
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        store = await _store(js, way)
        for size_bytes in SIZES:
            data = _content(size_bytes)
            path = tmp_path / f"in-{size_bytes}"
            path.write_bytes(data)
            sources: list[Any] = [data, bytearray(data), io.BytesIO(data), path, path.open("rb"), _pieces(data)]
            if driver.name != "blocking":
                sources.append(_async_pieces(data))
            for number, source in enumerate(sources):
                name = f"folder/{size_bytes} {number}"
                info = await store.put(name, source, chunk_bytes=CHUNK)
                assert (info.size_bytes, info.chunks) == (size_bytes, -(-size_bytes // CHUNK))
                assert await store.get_bytes(name) == data
                assert b"".join(await _collect(store.chunks(name))) == data
            sources[4].close()
            target, file = tmp_path / "out", io.BytesIO()
            assert (await store.get_file(name, target)).name == name
            await store.get_file(name, str(target))
            await store.get_file(name, file)
            assert target.read_bytes() == file.getvalue() == data
        assert not any(name.endswith(".part") for name in _names(tmp_path))


@on_both_drivers
async def test_a_large_object_is_sent_in_a_window_and_read_in_parts(driver: Driver, url: str, tmp_path: Path) -> None:
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store("files")
        data = _content((20 << 20) + 5)
        source = tmp_path / "large"
        source.write_bytes(data)
        for each in (data, source):
            info = await store.put("large", each)
            assert (info.chunks, info.chunk_bytes) == (161, 128 * 1024)
            assert await store.get_bytes("large") == data
        await store.get_file("large", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == data


@on_both_drivers
async def test_no_more_than_the_window_waits_for_acknowledgements(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        store = await _store(js, "plain")
        publisher = getattr(js, "_target", js)._context.publisher
        waiting = []

        def pieces() -> Iterator[bytes]:
            for _ in range(400):
                waiting.append(publisher.outstanding)
                yield bytes(64 << 10)

        await store.put("a", pieces(), chunk_bytes=64 << 10)
        assert 1 < max(waiting) <= WINDOW_BYTES // (64 << 10)


@on_both_drivers
async def test_over_fast_ingest_no_more_than_the_window_is_kept(
    driver: Driver, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        store = await _store(js, "fast")
        ours = sys.modules[f"{type(inside(store)).__module__.rpartition('.')[0]}.object_writer"]
        publishers: list[Any] = []
        make = ours.FastPublisher
        waiting = [0]

        def fast_publisher(*args: Any) -> Any:
            publishers.append(make(*args))
            return publishers[0]

        def pieces() -> Iterator[bytes]:
            for _ in range(400):
                waiting.append(publishers[0].pending if publishers else 0)
                yield bytes(64 << 10)

        # A put of more than five seconds flushes, which ends a batch. On a busy machine this one may take so long.
        monkeypatch.setattr(ours, "FLUSH_EVERY_S", math.inf)
        monkeypatch.setattr(ours, "FastPublisher", fast_publisher)
        await store.put("a", pieces(), chunk_bytes=64 << 10)
        assert 1 < max(waiting) <= WINDOW_BYTES // (64 << 10)
        assert publishers[0].batches == 1


@on_both_drivers
async def test_a_chunk_as_large_as_the_server_takes_leaves_no_room_for_an_id(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        store = await _store(nc.jetstream(), "fast")
        data = _content((2 << 20) + 1)
        info = await store.put("a", data, chunk_bytes=1 << 20)
        assert info.chunks == 3
        assert await store.get_bytes("a") == data


@on_both_drivers
async def test_a_bucket_of_another_client_is_found_again_by_its_creation(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        await _store(js, "plain")
        same = await js.create_object_store("files")
        assert not (await same.status()).stream.config.allow_batched
        with pytest.raises(jetspark.StreamNameInUse):
            await js.create_object_store(ObjectStoreConfig(bucket="files", max_bytes=5))


@on_both_drivers
async def test_an_object_that_is_replaced_while_it_is_read_is_never_mixed(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store("files")
        versions = [bytes([number]) * (3 << 20) for number in range(12)]
        await store.put("a", versions[0])

        async def replace() -> None:
            for version in versions[1:]:
                await store.put("a", version)

        replacing = asyncio.create_task(replace())
        while not replacing.done():
            assert await store.get_bytes("a") in versions
        await replacing
        await store.put("a", bytes(2 * READ_AHEAD_BYTES))
        reading = store.chunks("a")
        await anext(reading)
        await store.put("a", b"new")
        with pytest.raises(jetspark.DigestMismatch, match="replaced or deleted meanwhile"):
            await _collect(reading)
        assert await store.get_bytes("a") == b"new"


@on_both_drivers
async def test_metadata_is_kept_and_can_be_changed_without_the_content(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        store = await js.create_object_store("files")
        put = await store.put(
            "a", b"content", description="first", headers={"A": ["1", "2"]}, metadata={"owner": "me"}, chunk_bytes=3
        )
        info = await store.info("a")
        assert dataclasses.replace(put, mtime=info.mtime) == info
        assert (info.description, info.headers.get_all("A"), info.metadata) == ("first", ["1", "2"], {"owner": "me"})
        assert (info.bucket, info.name, info.size_bytes, info.chunks, info.chunk_bytes) == ("files", "a", 7, 3, 3)
        changed = await store.update_meta("a", dataclasses.replace(info.meta, description="second"))
        assert (changed.description, changed.nuid) == ("second", info.nuid)
        await store.update_meta("a", dataclasses.replace(changed.meta, name="b"))
        with pytest.raises(jetspark.ObjectNotFound):
            await store.info("a")
        renamed = await store.info("b")
        assert (renamed.description, renamed.headers.get_all("A"), renamed.metadata) == (
            "second",
            ["1", "2"],
            {"owner": "me"},
        )
        assert await store.get_bytes("b") == b"content"
        await store.put("c", b"in the way")
        with pytest.raises(jetspark.KeyExists, match="'c' in bucket 'files'"):
            await store.update_meta("b", ObjectMeta(name="c"))
        with pytest.raises(jetspark.ObjectNotFound):
            await store.update_meta("never there", ObjectMeta(name="d"))
        await store.delete("c")
        await store.update_meta("b", ObjectMeta(name="c"))
        assert [info.name for info in await _collect(store.list())] == ["c"]
        assert await store.get_bytes("c") == b"content"
        with pytest.raises(jetspark.InvalidHeader):
            await store.put("x", b"", headers={"a:b": "c"})
        with pytest.raises(jetspark.ConfigError, match="name=''"):
            await store.put("", b"")
        assert len(await _chunk_subjects(js, "files")) == 1


@on_both_drivers
async def test_a_name_that_has_no_form_in_utf_8_is_refused(driver: Driver, url: str) -> None:
    """Such as that of a file whose name is in another encoding."""
    name = os.fsdecode(b"caf\xe9")
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store("files")
        info = await store.put("a", b"content")
        calls: list[Callable[[], Any]] = [
            lambda: store.put(name, b""),
            lambda: store.info(name),
            lambda: store.get_bytes(name),
            lambda: store.delete(name),
            lambda: store.add_link(name, info),
            lambda: store.update_meta(name, info.meta),
        ]
        for call in calls:
            with pytest.raises(jetspark.ConfigError, match=r"name='caf\\udce9': expected .* UTF-8"):
                await call()


@on_both_drivers
@pytest.mark.parametrize("meanwhile", ["put", "delete", "rename"])
async def test_a_rename_of_what_somebody_else_changes_leaves_no_damaged_object(
    driver: Driver, url: str, meanwhile: str
) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        js = nc.jetstream()
        store, theirs = await js.create_object_store("files"), await other.jetstream().object_store("files")
        for number in range(12):
            await store.put("old", _content(3 * CHUNK), chunk_bytes=CHUNK)
            changes: dict[str, Callable[[], Any]] = {
                "put": lambda: theirs.put("old", _content(3 * CHUNK), chunk_bytes=CHUNK),
                "delete": lambda: theirs.delete("old"),
                "rename": lambda: theirs.update_meta("old", ObjectMeta(name="theirs")),
            }
            renaming = store.update_meta("old", ObjectMeta(name=f"new {number}"))
            ended = await asyncio.gather(renaming, changes[meanwhile](), return_exceptions=True)
            errors = [error for error in ended if isinstance(error, BaseException)]
            assert all(isinstance(each, jetspark.Conflict | jetspark.ObjectNotFound) for each in errors), errors
            infos = await _collect(store.list())
            assert [await store.get_bytes(each.name) for each in infos] == len(infos) * [_content(3 * CHUNK)]
            assert len({each.nuid for each in infos}) == len(infos) == len(await _chunk_subjects(js, "files"))
            for each in infos:
                await store.delete(each.name)


async def test_a_cancelled_rename_leaves_the_object_under_one_name(url: str) -> None:
    async with jetspark.connect(url) as nc:
        store = await nc.jetstream().create_object_store("files")
        for turns in range(16):
            await store.put("old", b"content")
            renaming = asyncio.create_task(store.update_meta("old", ObjectMeta(name="new")))
            for _ in range(turns):
                await asyncio.sleep(0.0001)
            renaming.cancel()
            await asyncio.wait({renaming})
            [info] = await _collect(store.list())
            await store.delete(info.name)


@on_both_drivers
async def test_a_replaced_or_deleted_object_leaves_no_chunks(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        store = await js.create_object_store("files")
        for version in range(3):
            info = await store.put("a", _content(5 * CHUNK + version), chunk_bytes=CHUNK)
            assert await store.get_bytes("a") == _content(5 * CHUNK + version)
            assert list(await _chunk_subjects(js, "files")) == [f"$O.files.C.{info.nuid}"]
        await store.delete("a")
        for read in (store.get_bytes, store.info, store.delete):
            with pytest.raises(jetspark.ObjectNotFound, match="no object 'a' in bucket 'files'"):
                await read("a")
        assert (await store.info("a", include_deleted=True)).is_deleted
        assert len(await _subjects(js, "files")) == 1
        await store.put("a", b"again")
        assert await store.get_bytes("a") == b"again"


@on_both_drivers
@WAYS
async def test_of_many_writers_one_wins_and_none_leaves_chunks(driver: Driver, url: str, way: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        store = await _store(js, way)
        contents = [bytes([number]) * 3 * CHUNK for number in range(8)]
        readings: list[bytes] = []

        async def write(data: bytes) -> None:
            await store.put("a", data, chunk_bytes=CHUNK)
            readings.append(await store.get_bytes("a"))

        await asyncio.gather(*(write(data) for data in contents))
        assert set(readings) <= set(contents)
        info = await store.info("a")
        assert await _chunk_subjects(js, "files") == {f"$O.files.C.{info.nuid}": 3}


@on_both_drivers
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "singly"])
async def test_a_damaged_object_is_an_error_and_touches_no_file(
    driver: Driver, url: str, tmp_path: Path, direct: bool
) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        await js.create_object_store("files")
        stream = await js.stream("OBJ_files")
        await stream.update(allow_direct=direct)
        store = await js.object_store("files")
        target = tmp_path / "out"
        target.write_bytes(b"before")
        for damage, reason in (
            ("deleted", "9 of 10 chunks"),
            ("added", "more than 10"),
            ("swapped", "digest SHA-256="),
        ):
            info = await store.put(damage, _content(10 * CHUNK), chunk_bytes=CHUNK)
            assert await store.get_bytes(damage) == _content(10 * CHUNK)
            subject = f"$O.files.C.{info.nuid}"
            if damage != "added":
                first = await stream.get_message(next_for=subject, direct=False)
                await stream.delete_message(first.sequence)
            if damage != "deleted":
                await js.publish(subject, _content(CHUNK))
            for read in (
                store.get_bytes(damage),
                store.get_file(damage, target),
                store.get_file(damage, io.BytesIO()),
                _collect(store.chunks(damage)),
            ):
                with pytest.raises(jetspark.DigestMismatch, match=reason):
                    await read
        assert target.read_bytes() == b"before"
        assert _names(tmp_path) == ["out"]
        with pytest.raises(jetspark.ObjectNotFound):
            await store.get_file("never there", target)


@on_both_drivers
@WAYS
async def test_a_source_that_fails_midway_leaves_what_was_there(
    driver: Driver, url: str, tmp_path: Path, way: str
) -> None:
    class Broken(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if self.tell() > 3 << 20:
                raise OSError("disk on fire")
            return super().read(size)

    async with driver.connect(url) as nc:
        js = nc.jetstream()
        store = await _store(js, way)
        error = OSError("disk on fire")
        sources: list[Any] = [_pieces(_content(50 * CHUNK), error), Broken(bytes(8 << 20)), [b"x" * 9 * CHUNK, "text"]]
        if driver.name != "blocking":
            sources.append(_async_pieces(_content(50 * CHUNK), error))
        for source in sources:
            with pytest.raises((OSError, jetspark.ConfigError), match=r"disk on fire|gives str"):
                await store.put("a", source, chunk_bytes=CHUNK)
            assert await _subjects(js, "files") == {}
        with pytest.raises(FileNotFoundError):
            await store.put("a", tmp_path / "nowhere")
        before = await store.put("a", b"before")
        with pytest.raises(OSError, match="disk on fire"):
            await store.put("a", _pieces(_content(50 * CHUNK), error), chunk_bytes=CHUNK)
        assert (await store.info("a")).nuid == before.nuid
        assert await store.get_bytes("a") == b"before"
        assert len(await _subjects(js, "files")) == 2


@WAYS
@pytest.mark.parametrize("source", ["iterator", "file", "bytes"])
async def test_a_cancelled_put_leaves_nothing(url: str, source: str, tmp_path: Path, way: str) -> None:
    async with jetspark.connect(url) as nc:
        js: Any = nc.jetstream()
        store = await _store(js, way)
        under_way = asyncio.Event()

        async def endless() -> AsyncIterator[bytes]:
            while True:
                yield bytes(CHUNK)
                under_way.set()

        path = tmp_path / "large"
        path.write_bytes(bytes(64 << 20))
        content: Any = {"iterator": endless(), "file": path, "bytes": bytes(64 << 20)}[source]
        for pause_s in (0.0, 0.001, 0.01, 0.05):
            putting = asyncio.create_task(store.put("a", content, chunk_bytes=CHUNK))
            if source == "iterator":
                await under_way.wait()
            await asyncio.sleep(pause_s)
            putting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await putting
            assert await _subjects(js, "files") == {}
            content = endless() if source == "iterator" else content


async def test_a_cancelled_get_file_ends_when_nobody_writes_to_the_file_any_more(url: str) -> None:
    has_begun, may_go_on = threading.Event(), threading.Event()

    class SlowFile:
        is_written_to = False

        def write(self, data: bytes) -> int:
            self.is_written_to = True
            has_begun.set()
            may_go_on.wait(PATIENCE_S)
            self.is_written_to = False
            return len(data)

    async with jetspark.connect(url) as nc:
        store = await nc.jetstream().create_object_store("files")
        await store.put("a", _content(10 * CHUNK), chunk_bytes=CHUNK)
        file = SlowFile()
        getting = asyncio.create_task(store.get_file("a", file))
        await asyncio.to_thread(has_begun.wait, 20)
        getting.cancel()
        await asyncio.wait({getting}, timeout=0.1)
        assert not (getting.done() and file.is_written_to)
        may_go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert not file.is_written_to


@on_both_drivers
@WAYS
async def test_when_the_connection_closes_nothing_is_visible_and_the_chunks_can_be_found(
    driver: Driver, url: str, way: str
) -> None:
    async with driver.connect(url) as nc, driver.connect(url) as other:
        js = other.jetstream()
        await _store(js, way)
        store = await nc.jetstream().object_store("files")

        def pieces() -> Iterator[bytes]:
            for _ in range(100):
                yield bytes(CHUNK)
            asyncio.run_coroutine_threadsafe(nc.close(), loop).result(PATIENCE_S)
            yield bytes(CHUNK)

        async def async_pieces() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield bytes(CHUNK)
            await nc.close()
            yield bytes(CHUNK)

        loop = asyncio.get_running_loop()
        source = pieces() if driver.name == "blocking" else async_pieces()
        with pytest.raises(jetspark.ConnectionClosed):
            await store.put("a", source, chunk_bytes=CHUNK)
        same = await js.object_store("files")
        assert await _collect(same.list()) == []
        kept = await same.put("b", bytes(5 * CHUNK), chunk_bytes=CHUNK)
        orphans = sum((await _chunk_subjects(js, "files")).values()) - 5
        assert 1 <= orphans <= 100  # over fast ingest the server says how many it wants at a time
        assert await same.purge_orphans() == 0  # too young: its put might be under way
        assert await same.purge_orphans(older_than=0.0) == orphans
        assert await _chunk_subjects(js, "files") == {f"$O.files.C.{kept.nuid}": 5}


def _interrupted(driver: Driver, count: int, interrupt: Callable[[], Any]) -> Any:
    """A source of so many chunks, in the middle of which something happens. They are told apart by their first byte."""

    def pieces() -> Iterator[bytes]:
        for number in range(count):
            if number == count // 2:
                interrupt()
            yield bytes([number % 251]) + bytes(CHUNK - 1)

    async def async_pieces() -> AsyncIterator[bytes]:
        reading = pieces()
        while (piece := await asyncio.get_running_loop().run_in_executor(None, next, reading, b"")) != b"":
            yield piece

    return pieces() if driver.name == "blocking" else async_pieces()


def _uninterrupted(count: int) -> bytes:
    return b"".join(bytes([number % 251]) + bytes(CHUNK - 1) for number in range(count))


@on_both_drivers
async def test_a_restart_of_the_server_fails_the_plain_put_and_its_chunks_go(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url, reconnect_wait_s=0.01) as nc:
        js = nc.jetstream()
        store = await _store(js, "plain")
        try:
            await store.put("a", _interrupted(driver, 200, own.restart), chunk_bytes=CHUNK)
        except (jetspark.ConnectionLost, jetspark.JetStreamUnavailable):
            assert await _subjects(js, "files") == {}
        else:
            assert await store.get_bytes("a") == _uninterrupted(200)


@on_both_drivers
async def test_over_fast_ingest_a_put_survives_a_crash_of_the_server(driver: Driver, own: NatsServer) -> None:
    def crash() -> None:
        own.kill()
        own.start()

    async with driver.connect(own.url, reconnect_wait_s=0.01) as nc:
        js = nc.jetstream()
        store = await _store(js, "fast")
        for number in range(3):
            info = await store.put("a", _interrupted(driver, 3000, crash), chunk_bytes=CHUNK)
            assert await store.get_bytes("a") == _uninterrupted(3000), number
            assert await _chunk_subjects(js, "files") == {f"$O.files.C.{info.nuid}": 3000}


@on_both_drivers
async def test_chunks_whose_ids_were_forgotten_are_not_stored_twice_unnoticed(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url, reconnect_wait_s=0.01) as nc, driver.connect(own.url) as other:
        js = nc.jetstream()
        await _store(js, "fast")
        # The client is told of a longer window than there is.
        store = await js.object_store("files")
        await (await js.stream("OBJ_files")).update(duplicate_window_s=0.1)
        loop = asyncio.get_running_loop()
        stored = await other.subscribe("$O.files.C.>")

        async def until_some_are_stored() -> None:
            for _ in range(20):  # a subscriber sees a message when the stream does
                await stored.next(30)
            await (await other.jetstream().stream("OBJ_files")).info()

        def crash() -> None:
            asyncio.run_coroutine_threadsafe(until_some_are_stored(), loop).result(PATIENCE_S)
            own.kill()
            time.sleep(0.3)  # the window passes
            own.start()

        with pytest.raises(jetspark.ConnectionLost, match=r"100 chunks became [1-9]\d\d+ .*; put it again"):
            await store.put("a", _interrupted(driver, 100, crash), chunk_bytes=CHUNK)
        assert await _subjects(js, "files") == {}


@on_both_drivers
async def test_a_put_that_nobody_answers_gives_up_and_its_chunks_go(driver: Driver, own: NatsServer) -> None:
    async with driver.connect(own.url) as nc, driver.connect(own.url) as other:
        js = nc.jetstream()
        store = await _store(js, "fast")
        loop = asyncio.get_running_loop()

        def refuse() -> None:
            async def update() -> None:
                await (await other.jetstream().stream("OBJ_files")).update(subjects=["$O.files.M.>"])

            asyncio.run_coroutine_threadsafe(update(), loop).result(PATIENCE_S)

        with pytest.raises(
            jetspark.RequestTimeout, match=r"put of object 'a' into bucket 'files' .*within 1 s"
        ) as caught:
            await store.put("a", _interrupted(driver, 3000, refuse), chunk_bytes=CHUNK, timeout=1.0)
        assert isinstance(caught.value.__cause__, jetspark.BatchInDoubt)
        assert await _subjects(js, "files") == {}


_PUT_WITHOUT_END = """
import itertools, sys
import jetspark.blocking as jetspark
nc = jetspark.connect(sys.argv[1])
nc.jetstream().object_store("files").put("a", itertools.repeat(bytes(4096)), chunk_bytes=4096)
"""


@on_both_drivers
async def test_what_a_killed_process_has_put_is_invisible_and_can_be_removed(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        store = await _store(js, "fast")
        kept = await store.put("kept", bytes(20 * CHUNK), chunk_bytes=CHUNK)
        stored = await nc.subscribe("$O.files.C.*")
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", _PUT_WITHOUT_END, url)
        try:
            for _ in range(100):
                await stored.next(30)
        finally:
            process.kill()
            await process.wait()
        await stored.unsubscribe()
        with pytest.raises(jetspark.ObjectNotFound):
            await store.info("a")
        assert await store.purge_orphans() == 0  # so young, its put might be under way
        removed = 0
        async with asyncio.timeout(PATIENCE_S):
            while sum((await _subjects(js, "files")).values()) > kept.chunks + 1:  # the last may still arrive
                removed += await store.purge_orphans(older_than=0.0)
        assert removed >= 100
        assert await store.get_bytes("kept") == bytes(20 * CHUNK)


@on_both_drivers
@pytest.mark.parametrize("way", ["fast", "plain"])
async def test_a_long_put_whose_chunks_were_taken_for_orphans_fails(
    driver: Driver, url: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would be visible, and damaged."""
    monkeypatch.setattr("jetspark.aio.objects.LONG_PUT_S", 0.0)
    monkeypatch.setattr("jetspark.blocking.objects.LONG_PUT_S", 0.0)
    async with driver.connect(url) as nc, driver.connect(url) as other:
        js = nc.jetstream()
        store = await _store(js, way)
        await store.put("a", b"before")
        loop = asyncio.get_running_loop()
        removed: list[int] = []

        def purge() -> None:
            async def remove() -> None:
                async with asyncio.timeout(PATIENCE_S):
                    while not removed or not removed[-1]:  # until some have arrived
                        removed.append(await (await other.jetstream().object_store("files")).purge_orphans(0.0))

            asyncio.run_coroutine_threadsafe(remove(), loop).result(PATIENCE_S)

        with pytest.raises(
            jetspark.ConnectionLost, match=r"3000 chunks became \d+ before .* were purged; put it again"
        ):
            await store.put("a", _interrupted(driver, 3000, purge), chunk_bytes=CHUNK)
        assert await store.get_bytes("a") == b"before"
        assert sum((await _subjects(js, "files")).values()) == 2  # what was there before


@on_both_drivers
@pytest.mark.parametrize(("way", "happens"), [("fast", "purged"), ("plain", "purged"), ("plain", "made again")])
async def test_a_put_under_which_the_bucket_loses_chunks_fails_however_short_it_is(
    driver: Driver, url: str, way: str, happens: str
) -> None:
    """It would be visible, and damaged."""
    async with driver.connect(url) as nc, driver.connect(url) as other:
        js, theirs = nc.jetstream(), other.jetstream()
        store = await _store(js, way)
        loop = asyncio.get_running_loop()

        async def lose() -> None:
            stream = await theirs.stream("OBJ_files")
            before, arrived = 0, 0
            async with asyncio.timeout(PATIENCE_S):
                # Until all that is on its way has arrived: a stream that is deleted answers none of what it was sent.
                while not arrived or arrived != before:
                    await asyncio.sleep(0.05)
                    before, arrived = arrived, (await stream.info()).state.messages
            if happens == "purged":
                await stream.purge()
            else:
                await stream.delete()
                await theirs.create_stream(ObjectStoreConfig(bucket="files").to_stream())

        def wait() -> None:
            asyncio.run_coroutine_threadsafe(lose(), loop).result(PATIENCE_S)

        with pytest.raises(jetspark.ConnectionLost, match=r"3000 chunks became \d+ .* put it again"):
            await store.put("a", _interrupted(driver, 3000, wait), chunk_bytes=CHUNK)
        with pytest.raises(jetspark.ObjectNotFound):
            await store.get_bytes("a")
        assert await _subjects(js, "files") == {}


@on_both_drivers
async def test_a_slow_source_is_waited_for(driver: Driver, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jetspark.aio.object_writer.FLUSH_EVERY_S", 0.2)
    monkeypatch.setattr("jetspark.blocking.object_writer.FLUSH_EVERY_S", 0.2)

    def pieces() -> Iterator[bytes]:
        for _ in range(25):
            time.sleep(0.1)
            yield bytes(CHUNK)

    async def async_pieces() -> AsyncIterator[bytes]:
        for _ in range(25):
            await asyncio.sleep(0.1)
            yield bytes(CHUNK)

    async with driver.connect(url) as nc:
        store = await _store(nc.jetstream(), "fast")
        source = pieces() if driver.name == "blocking" else async_pieces()
        await store.put("a", source, chunk_bytes=CHUNK, timeout=1.0)
        assert await store.get_bytes("a") == bytes(25 * CHUNK)


@on_both_drivers
async def test_links_are_followed_within_a_bucket_and_to_another(driver: Driver, url: str, tmp_path: Path) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        files, other = await js.create_object_store("files"), await js.create_object_store("other")
        here, there = await files.put("here", b"here"), await other.put("there", b"there")
        link = await files.add_link("link", here)
        await files.add_link("away", there)
        await files.add_bucket_link("bucket", "other")
        assert await files.get_bytes("link") == b"here"
        assert await files.get_bytes("away") == b"there"
        assert b"".join(await _collect(files.chunks("away"))) == b"there"
        assert (await files.get_file("away", tmp_path / "out")).bucket == "other"
        info = await files.info("away")
        assert (info.link, info.size_bytes) == (jetspark.ObjectLink(bucket="other", name="there"), 0)
        with pytest.raises(jetspark.ConfigError, match="link to bucket 'other'"):
            await files.get_bytes("bucket")
        with pytest.raises(jetspark.ConfigError, match="link itself"):
            await files.add_link("further", link)
        with pytest.raises(jetspark.KeyExists):
            await files.add_link("here", there)
        await files.add_link("link", there)  # a link may be turned
        assert await files.get_bytes("link") == b"there"
        await other.delete("there")
        with pytest.raises(jetspark.ObjectNotFound, match="'there' in bucket 'other'"):
            await files.get_bytes("link")
        with pytest.raises(jetspark.ConfigError, match="deleted"):
            await files.add_link("late", await other.info("there", include_deleted=True))
        await files.put("link", b"an object now")
        assert await files.get_bytes("link") == b"an object now"
        await files.delete("away")
        assert sorted([info.name for info in await _collect(files.list())]) == ["bucket", "here", "link"]


@on_both_drivers
async def test_objects_are_listed_and_watched(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store("files")
        assert await _collect(store.list()) == []
        assert await _collect(store.watch(initial_marker=True), 1) == [None]
        for name in ("a", "b", "c"):
            await store.put(name, name.encode())
        await store.delete("b")
        assert [info.name for info in await _collect(store.list())] == ["a", "c"]

        def brief(infos: list[Any]) -> list[Any]:
            return [info and (info.name, info.is_deleted) for info in infos]

        seen = await _collect(store.watch(initial_marker=True), 4)
        assert brief(seen) == [("a", False), ("c", False), ("b", True), None]
        seen = await _collect(store.watch(initial_marker=True, ignore_deletes=True), 3)
        assert brief(seen) == [("a", False), ("c", False), None]
        ready, updates = asyncio.Event(), store.watch(updates_only=True, initial_marker=True)

        async def follow() -> list[Any]:
            seen = []
            async for info in updates:
                seen.append(info)
                ready.set()
                if len(seen) == 3:
                    break
            return seen

        following = asyncio.create_task(follow())
        await ready.wait()
        await store.put("d", b"")
        await store.delete("a")
        async with asyncio.timeout(PATIENCE_S):
            assert brief(await following) == [None, ("d", False), ("a", True)]


@on_both_drivers
async def test_a_sealed_bucket_can_only_be_read(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        store = await nc.jetstream().create_object_store(ObjectStoreConfig(bucket="files", description="for ever"))
        await store.put("a", b"content")
        assert not (await store.status()).is_sealed
        await store.seal()
        status = await store.status()
        assert (status.bucket, status.is_sealed, status.ttl_s) == ("files", True, 0.0)
        assert status.bytes > 7
        for change in (
            store.put("b", b"x"),
            store.put("b", bytes(2 * CHUNK), chunk_bytes=CHUNK),
            store.put("a", b""),
            store.delete("a"),
            store.update_meta("a", ObjectMeta(name="z")),
        ):
            with pytest.raises(jetspark.ServerError, match="sealed"):
                await change
        assert await store.get_bytes("a") == b"content"


@on_both_drivers
@WAYS
async def test_a_full_bucket_refuses_an_object_and_keeps_the_others(driver: Driver, url: str, way: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        store = await _store(js, way, ObjectStoreConfig(bucket="small", max_bytes=100 * CHUNK, ttl_s=3600.0))
        await store.put("a", bytes(10 * CHUNK), chunk_bytes=CHUNK)
        subjects = await _subjects(js, "small")
        with pytest.raises(jetspark.ServerError, match="maximum bytes"):
            await store.put("b", bytes(200 * CHUNK), chunk_bytes=CHUNK)
        assert await _subjects(js, "small") == subjects
        assert await store.get_bytes("a") == bytes(10 * CHUNK)
        assert (await store.status()).ttl_s == 3600.0
        with pytest.raises(jetspark.PayloadTooLarge):
            await store.put("c", bytes(2 << 20), chunk_bytes=2 << 20)


@on_both_drivers
async def test_buckets_are_created_found_listed_and_deleted(driver: Driver, url: str) -> None:
    async with driver.connect(url) as nc:
        js = nc.jetstream()
        for name in ("one", "two"):
            await js.create_object_store(name)
        await js.create_kv(jetspark.KVConfig(bucket="three"))
        assert sorted(await _collect(js.object_store_names())) == ["one", "two"]
        assert (await js.object_store("one")).bucket == "one"
        await js.delete_object_store("one")
        with pytest.raises(jetspark.StreamNotFound):
            await js.object_store("one")
        with pytest.raises(jetspark.ConfigError, match="bucket"):
            await js.create_object_store("a.b")


@on_both_drivers
async def test_another_client_reads_what_we_write_and_the_other_way_round(driver: Driver, url: str) -> None:
    import nats
    import nats.js.api
    import nats.js.errors

    theirs = await nats.connect(url)
    try:
        async with driver.connect(url) as nc:
            js = nc.jetstream()
            ours = await js.create_object_store("shared")
            their_view = await theirs.jetstream().object_store("shared")
            data = _content(10 * CHUNK + 1)
            await ours.put("ours ü", data, description="d", headers={"A": "1"}, chunk_bytes=CHUNK)
            result = await their_view.get("ours ü")
            assert (result.data, result.info.size, result.info.chunks) == (data, len(data), 11)
            assert (result.info.description, result.info.headers) == ("d", {"A": ["1"]})

            their_bucket = await theirs.jetstream().create_object_store("their_own")
            for store, other in ((their_view, ours), (their_bucket, await js.object_store("their_own"))):
                meta = nats.js.api.ObjectMeta(
                    description="t", headers={"B": "2"}, options=nats.js.api.ObjectMetaOptions(max_chunk_size=CHUNK)
                )
                await store.put("theirs", data, meta=meta)
                info = await other.info("theirs")
                assert (info.size_bytes, info.chunks, info.description) == (len(data), 11, "t")
                assert info.headers.get_all("B") == ["2"]
                assert await other.get_bytes("theirs") == data
                await other.put("theirs", b"replaced")
                assert (await store.get("theirs")).data == b"replaced"
                await store.put("theirs", b"and back")
                assert await other.get_bytes("theirs") == b"and back"
                await store.delete("theirs")
                with pytest.raises(jetspark.ObjectNotFound):
                    await other.get_bytes("theirs")
                await other.put("theirs", b"again")
                await other.delete("theirs")
                with pytest.raises(nats.js.errors.ObjectNotFoundError):
                    await store.get("theirs")

            await ours.add_link("link", await ours.info("ours ü"))
            assert (await their_view.get("link")).data == data
            assert sorted(entry.name for entry in await their_view.list(ignore_deletes=True)) == ["link", "ours ü"]
            assert sorted([info.name for info in await _collect(ours.list())]) == ["link", "ours ü"]
            assert len(await _chunk_subjects(js, "shared")) == 1
    finally:
        await theirs.close()
