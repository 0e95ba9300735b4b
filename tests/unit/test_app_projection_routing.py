"""Live engines and Spark route every message alike, whatever is in it: random batches, most of them with junk.

The reference is :func:`expected`: one message at a time, by the documented decoder and the projection's own functions.
"""

from __future__ import annotations

import datetime
import json
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import pytest

pytest.importorskip("pyspark")

from support import seeds
from support.projections import route_one, sorted_into

from jetspark.aio.stream_message import JetStreamMessage
from jetspark.app import DELETE, App, Event, Timestamp, encode, upcast
from jetspark.app.contracts.envelope import decode, read_event
from jetspark.app.contracts.faults import user_errors
from jetspark.app.projections.key_state import KeyState
from jetspark.app.projections.router import Failure, KeyRows, Recorded, Router, recorded_delivery
from jetspark.app.projections.state_header import ID_BYTES, Identified, digest_of
from jetspark.app.projections.windows import Window
from jetspark.core import headers as header_block
from jetspark.core.headers import Headers
from jetspark.errors import ContractViolation
from jetspark.jetstream.info import StoredMessage
from jetspark.spark.engine.projection_fold import COLUMNS, ProjectionFold
from jetspark.spark.engine.rows import LETTER, Readings, RouteRows, unpack
from jetspark.state.changes import NOTHING, Change
from jetspark.state.deliveries import sequences_of

NOON = datetime.datetime(2026, 3, 31, 12, tzinfo=datetime.UTC)


class Sold(Event, type="shop.sold", version=2, key="shop", subject="shop.{shop}.sold"):
    shop: str
    cents: int
    at: Timestamp | None = None


class Closed(Event, type="shop.closed", version=1, key="shop", subject="shop.{shop}.closed"):
    shop: str


class OldName(Event, type="shop.named", version=1, key="shop", subject="shop.{shop}.named"):
    shop: str


class NewName(Event, type="shop.named", version=2, key="shop", subject="shop.{shop}.named"):
    shop: str
    name: str


class Seen(Event, type="shop.seen", version=1, key="shop", subject="shop.{shop}.seen"):
    """An event that no projection takes."""

    shop: str


def at_least_zero(state: int) -> bool:
    return state >= 0


class Sums:
    def key(self, event: Sold | Closed) -> Any:
        if isinstance(event, Closed):
            return event.shop
        match event.cents:
            case 13:
                raise ValueError("no key for 13 cents")
            case 14:
                return None
            case 15:
                return [event.shop, "all", event.shop]
            case 16:
                return 1.5
        return event.shop

    def apply(self, state: int | None, event: Sold | Closed) -> Any:
        if isinstance(event, Closed):
            return DELETE
        if event.cents == 66:
            raise ValueError("cannot be applied")
        return ((state or 0) * 3 + event.cents) % 1_000_003


class Names:
    def key(self, event: OldName | NewName) -> str:
        return event.shop

    def apply(self, state: list[str] | None, event: OldName | NewName) -> list[str]:
        return [*(state or []), getattr(event, "name", "")]


class Large:
    def key(self, event: Sold) -> str:
        return event.shop

    def apply(self, state: int | None, event: Sold, lookup: Any) -> int:
        return (state or 0) + (lookup["sums"] or 0)


def time_of(event: Sold | Closed) -> Any:
    return getattr(event, "at", NOON)


app = App("shops", stream="SHOPS", subjects=["shop.>"], events=[OldName, NewName, Seen])
app.projection("sums", events=[Sold, Closed], bucket="sums", invariants=[at_least_zero])(Sums)
app.projection("names", events=[OldName, NewName], bucket="names")(Names)
app.projection("panes", events=[Sold], bucket="panes", window=Window(size_s=120, every_s=60, grace_s=60))(Sums)
app.projection("days", events=[Sold, Closed], bucket="days", window=Window(size_s=86400, late="keep", time=time_of))(
    Sums
)
app.projection("once", events=[Sold, Closed], bucket="once", unique_ids=3)(Sums)
app.projection("once_a_minute", events=[Sold], bucket="once_a_minute", unique_ids=2, window=Window(size_s=60))(Sums)
app.projection("large", events=[Sold], bucket="large", lookups=["sums"])(Large)


@upcast(Sold, from_version=1)
def in_cents(data: dict[str, Any]) -> dict[str, Any]:
    if data.get("euros") == 99:
        raise ValueError("cannot be upcast")
    return {"shop": data["shop"], "cents": data["euros"] * 100}


SPECS = list(app.projections.values())
NAMES = list(app.projections)


# ---- junk -----------------------------------------------------------------------------------------------------------


def some_event(rng: random.Random) -> Event:
    shop = rng.choice(["s1", "s2", "s3", "s.4", "s=5", "é"])
    match rng.randrange(10):
        case 0:
            return Closed(shop=shop)
        case 1:
            return NewName(shop=shop, name=rng.choice(["x", "", "é\u2028"]))
        case 2:
            return OldName(shop=shop)
        case 3:
            return Seen(shop=shop)
    at = rng.choice([None, NOON, NOON + datetime.timedelta(days=rng.randrange(3))])
    return Sold(shop=shop, cents=rng.choice([1, 2, 3, 13, 14, 15, 16, 66, -1, 2**40]), at=at)


def _without(rng: random.Random, fields: dict[str, Any]) -> None:
    fields.pop(rng.choice(list(fields)), None)


def _without_in_data(rng: random.Random, fields: dict[str, Any]) -> None:
    data = fields.get("data")
    if isinstance(data, dict) and data:
        data.pop(rng.choice(list(data)))


def _other_value(rng: random.Random, fields: dict[str, Any]) -> None:
    fields[rng.choice(list(fields))] = rng.choice(
        [None, "", 0, -1, 1.5, True, [], {}, "x", "2026-03-31T12:00:00", "1.0"]
    )


def _other_value_in_data(rng: random.Random, fields: dict[str, Any]) -> None:
    data = fields.get("data")
    if isinstance(data, dict) and data:
        data[rng.choice(list(data))] = rng.choice([None, "", 0, 1e400, "x" * 3001, True, [1], {"a": 1}, "a.b"])


def _other_version(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["schemaversion"] = rng.choice([None, 0, 1, 1, 1, 2, 2, 3, 9, -1, "1", 2**70])
    if fields["schemaversion"] == 1 and isinstance(fields.get("data"), dict) and "cents" in fields["data"]:
        fields["data"] = {"shop": fields["data"].get("shop"), "euros": rng.choice([1, 99, None, "x"])}


def _other_type(rng: random.Random, fields: dict[str, Any]) -> None:
    fields["type"] = rng.choice(["shop.sold", "shop.closed", "shop.named", "shop.seen", "shop.unknown", "", "é"])


def _other_time(rng: random.Random, fields: dict[str, Any]) -> None:
    moment = NOON + datetime.timedelta(seconds=rng.randrange(-7200, 7200))
    fields["time"] = rng.choice([moment.isoformat(), None, "yesterday", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59Z"])


def _extra(rng: random.Random, fields: dict[str, Any]) -> None:
    fields[rng.choice(["unknown", "data_base64", "specversion", "datacontenttype"])] = rng.choice(
        ["1.0", "e30=", "x", 1]
    )


def _other_order(rng: random.Random, fields: dict[str, Any]) -> None:
    items = list(fields.items())
    rng.shuffle(items)
    fields.clear()
    fields.update(items)


CHANGES = [
    _without,
    _without_in_data,
    _other_value,
    _other_value_in_data,
    _other_version,
    _other_version,
    _other_type,
    _other_time,
    _other_time,
    _extra,
    _other_order,
]


def _written(rng: random.Random, fields: dict[str, Any]) -> bytes:
    """JSON, sometimes with a key twice, with spaces, or with surrogates that are not text."""
    pairs = list(fields.items())
    if rng.random() < 0.1 and pairs:
        name, value = rng.choice(pairs)
        other = {name: value}
        rng.choice(CHANGES)(rng, other)
        pairs.insert(rng.randrange(len(pairs) + 1), (name, other.get(name, value)))
    body = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs)
    text = f"{{{body}}}"
    if rng.random() < 0.05:
        text = f"  {text}\n "
    return text.encode()


def _damaged(rng: random.Random, data: bytes) -> bytes:
    match rng.randrange(6):
        case 0:
            return data[: rng.randrange(len(data) + 1)]
        case 1:
            at = rng.randrange(len(data) + 1)
            return data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :]
        case 2:
            return rng.randbytes(rng.randrange(40))
        case 3:
            return rng.choice([b"", b"null", b"[]", b"{}", b'"x"', b"1", b"[" * 5000, b"\xff\xfe{\x00}\x00"])
        case 4:
            return data + rng.choice([b"}", b"{}", b"\x00", data])
    return rng.choice([b"\xef\xbb\xbf", b"\xff"]) + data


class Given(NamedTuple):
    subject: str
    data: bytes
    headers: bytes | None
    time_us: int


def some_message(rng: random.Random, number: int, before: list[Given]) -> Given:
    if before and rng.random() < 0.15:  # stored again, later
        again = rng.choice(before)
        return again._replace(time_us=again.time_us + rng.randrange(10**9))
    event = some_event(rng)
    time = NOON + datetime.timedelta(seconds=rng.randrange(-300, 300))
    sent = encode(event, id=f"e-{rng.randrange(50)}", source=rng.choice(["/a", "/b"]), time=time)
    subject, data, headers = sent.subject, sent.data, Headers(sent.headers)
    if rng.random() < 0.5:
        fields = json.loads(data)
        for _ in range(rng.choice([1, 1, 2])):
            rng.choice(CHANGES)(rng, fields)
        data = _written(rng, fields)
    if rng.random() < 0.15:
        data = _damaged(rng, data)
    if rng.random() < 0.1:
        subject = rng.choice(["shop.s1.other", "shop.s1.sold", "shop.s1.seen", "elsewhere", "shop.s1.sold.more"])
    raw: bytes | None = header_block.encode(headers)
    match rng.randrange(12):
        case 0:
            raw = None
        case 1:  # an event in binary form
            fields = {"ce-specversion": "1.0", "ce-id": f"b{number}", "ce-source": "/c", "ce-type": "shop.closed"}
            if rng.random() < 0.3:
                fields.pop(rng.choice(list(fields)))
            raw, data = header_block.encode(Headers(fields)), rng.choice([b'{"shop":"s1"}', b'{"shop":1}', b"{"])
        case 2:  # published again and again by a timer
            timed = {"Nats-Schedule-Next": rng.choice(["2026-03-31T12:00:00Z", "purge", ""])}
            raw = header_block.encode(Headers(timed))
        case 3:
            raw = rng.choice([b"NATS/1.0\r\nno colon\r\n\r\n", b"NATS/1.0\r\nA: \xff\xfe\r\n\r\n", b"junk", b"\xff"])
    stored = time + datetime.timedelta(seconds=rng.choice([0, 1, 61, 121, 500, 86400]))
    return Given(subject, data, raw, int(stored.timestamp()) * 1_000_000 + rng.randrange(10**6))


def some_batch(seed: int) -> list[Recorded]:
    rng, given = random.Random(seed), list[Given]()
    is_clean = seed % 5 == 0  # where no event is odd, keys are looked at together
    for number in range(rng.choice([1, 2, 5, 20, 60])):
        if is_clean:
            sold = Sold(shop=f"s{rng.randrange(4)}", cents=rng.randrange(1, 9), at=NOON)
            sent = encode(sold, id=f"e-{rng.randrange(20)}", source="/a", time=NOON)
            given.append(Given(sent.subject, sent.data, None, int(NOON.timestamp()) * 1_000_000))
        else:
            given.append(some_message(rng, number, given))
    sequence, found = 0, list[Recorded]()
    for each in given:
        sequence += rng.choice([1, 1, 1, 7])
        found.append(Recorded(sequence, *each))
    return found


# ---- what must come of it -------------------------------------------------------------------------------------------

Rows = list[tuple[str, int, Any]]
"""Key, sequence and event of one projection; with ``unique_ids`` the event stands behind its id."""


class Routes(NamedTuple):
    """The rows of each projection, and for each unreadable message: its sequence, projections, and first error."""

    rows: dict[str, Rows]
    dead_letters: list[tuple[int, list[str], str]]


def _letter(sequence: int, failures: Iterable[Failure]) -> tuple[int, list[str], str]:
    failures = list(failures)
    names = sorted({name for failure in failures for name in failure.projections})
    return sequence, names, f"{type(failures[0].error).__name__}: {failures[0].error}"


def expected(messages: Iterable[Recorded]) -> Routes:
    filters = Router(SPECS, app.catalogue).filters
    endings = [each.rpartition(".")[2] for each in filters]
    found = Routes({name: [] for name in NAMES}, [])
    for message in messages:
        tokens = message.subject.split(".")
        if len(tokens) != 3 or tokens[0] != "shop" or tokens[2] not in endings:
            continue
        try:
            decoded = decode(message.subject, message.data, message.headers, app.catalogue)
        except ContractViolation as error:
            found.dead_letters.append(_letter(message.sequence, [Failure(tuple(NAMES), message.sequence, error)]))
            continue
        # `decode` leaves the time out of an event that a timer published; windows use that of the envelope.
        sent = read_event(message.subject, message.data, message.headers, app.catalogue)[0].time
        failures = []
        for spec in SPECS:
            if type(decoded.event) not in spec.events:
                continue
            try:
                keys = spec.windowed_keys_of(decoded.event, sent, message.time_us)
            except user_errors() as error:
                failures.append(Failure((spec.name,), message.sequence, error))
                continue
            event: Any = decoded.event
            if spec.unique_ids:
                event = Identified(digest_of(decoded.source, decoded.id), event)
            found.rows[spec.name] += [(key, message.sequence, event) for key in keys]
        if failures:
            found.dead_letters.append(_letter(message.sequence, failures))
    return found


def by_one(messages: list[Recorded]) -> Routes:
    router = Router(SPECS, app.catalogue)
    found = Routes({name: [] for name in NAMES}, [])
    for message in messages:
        routing = route_one(router, message)
        for row in routing.rows:
            found.rows[row.projection].append((row.key, row.sequence, row.event))
        if routing.failures:
            found.dead_letters.append(_letter(message.sequence, routing.failures))
    return found


def delivered(messages: Iterable[Recorded]) -> list[JetStreamMessage]:
    """The messages as a consumer sends them."""
    found = []
    for number, each in enumerate(messages, 1):
        assert not isinstance(each.headers, Mapping)
        reply = f"$JS.ACK.SHOPS.c.1.{each.sequence}.{number}.{each.time_us * 1000}.0".encode()
        found.append(JetStreamMessage(each.subject, each.data, reply, each.headers, None))
    return found


def _of_columns(rows: dict[str, KeyRows], failed: Iterable[tuple[Recorded, list[Failure]]]) -> Routes:
    dead_letters = [_letter(message.sequence, failures) for message, failures in failed]
    return Routes({name: list(each) for name, each in rows.items()}, dead_letters)


def live(messages: list[Recorded]) -> Routes:
    rows, given = {name: KeyRows() for name in NAMES}, delivered(messages)
    router = Router(SPECS, app.catalogue)
    return _of_columns(rows, router.add_rows(given, sequences_of(given), recorded_delivery, rows))


def live_of_everything(messages: list[Recorded]) -> Routes:
    """An application that owns its stream reads all of it, and leaves out foreign subjects by itself."""
    rows = {name: KeyRows() for name in NAMES}
    return _of_columns(rows, sorted_into(rows, Router(SPECS, app.catalogue, owns_stream=True), messages))


def spark_rows(messages: list[Recorded]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = (
        RouteRows(app, NAMES, subjects=[]).of_messages("SHOPS", delivered(messages)).to_pylist()
    )
    return found


def spark_rows_of_stored(messages: list[Recorded]) -> list[dict[str, Any]]:
    stored = [
        StoredMessage(
            stream="SHOPS",
            subject=each.subject,
            sequence=each.sequence,
            timestamp=datetime.datetime.fromtimestamp(0, datetime.UTC) + datetime.timedelta(microseconds=each.time_us),
            data=each.data,
            headers=header_block.readable(each.headers) if isinstance(each.headers, bytes) else Headers(),
        )
        for each in messages
    ]
    found: list[dict[str, Any]] = RouteRows(app, NAMES, subjects=[]).of_stored("SHOPS", stored).to_pylist()
    return found


def _of_spark(found: list[dict[str, Any]]) -> Routes:
    readers, routes = Readings(app).readers, Routes({name: [] for name in NAMES}, [])
    for row in found:
        if row["target"] == LETTER:
            dead_letter = unpack(row["data"])
            names, _, text = dead_letter.cause.message.partition(": ")
            routes.dead_letters.append(
                (dead_letter.sequence, names.split(", "), f"{dead_letter.cause.error.rpartition('.')[2]}: {text}")
            )
            continue
        name, data = NAMES[row["target"]], row["data"]
        is_identified = bool(app.projections[name].unique_ids)
        event = readers[row["reading"]](data[ID_BYTES:] if is_identified else data)
        taken = Identified(data[:ID_BYTES], event) if is_identified else event
        routes.rows[name].append((row["key"], row["sequence"], taken))
    return routes


def spark(messages: list[Recorded]) -> Routes:
    return _of_spark(spark_rows(messages))


def spark_of_stored(messages: list[Recorded]) -> Routes:
    return _of_spark(spark_rows_of_stored(messages))


PATHS: list[Callable[[list[Recorded]], Routes]] = [by_one, live, live_of_everything, spark, spark_of_stored]


def wanted(messages: list[Recorded]) -> list[Recorded]:
    """What the server sends to a reader of the projections' subjects only."""
    is_wanted = Router(SPECS, app.catalogue, owns_stream=True).is_wanted
    assert is_wanted is not None
    return [each for each in messages if is_wanted(each.subject)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.__name__)
@pytest.mark.parametrize("seed", seeds.tried(range(60), 15))
def test_every_path_has_the_rows_and_the_unreadable_messages_of_the_reference(
    seed: int, path: Callable[[list[Recorded]], Routes]
) -> None:
    messages = some_batch(seed)
    if path is live:
        messages = wanted(messages)
    right, found = expected(messages), path(messages)
    assert found.dead_letters == right.dead_letters, seeds.again(seed)
    for name in NAMES:
        assert found.rows[name] == right.rows[name], f"{seeds.again(seed)}: {name}"


def test_the_junk_reaches_every_case() -> None:
    found = [expected(some_batch(seed)) for seed in range(60)]
    assert all(sum(len(each.rows[name]) for each in found) > 30 for name in NAMES)
    kinds = {why.partition(":")[0] for each in found for _, _, why in each.dead_letters}
    assert kinds >= {
        "NotJson",
        "NotAnEnvelope",
        "UnknownEventType",
        "UnknownEventVersion",
        "MissingField",
        "WrongFieldType",
        "UpcastFailed",
        "ValueError",
        "ConfigError",
    }
    assert any(key.endswith(".late") for each in found for key, _, _ in each.rows["panes"])
    assert any(isinstance(event, OldName) for each in found for _, _, event in each.rows["names"])


def changes_of_live(messages: list[Recorded]) -> dict[tuple[str, str], Change]:
    found: dict[tuple[str, str], Change] = {}
    for name, rows in live_of_everything(messages).rows.items():
        spec, states = app.projections[name], dict[str, KeyState]()
        for key, sequence, event in rows:
            states.setdefault(key, KeyState(spec, key, NOTHING)).apply(spec, key, sequence, event)
        for key, state in states.items():
            if (change := state.change(spec, key)) is not None:
                found[name, key] = change
    return found


def changes_of_spark(messages: list[Recorded]) -> dict[tuple[str, str], Change]:
    fold = ProjectionFold(
        SPECS,
        [spec.bucket.bucket for spec in SPECS],
        Readings(app).readers,
        patience_s=1,
        check_keys=lambda count: None,
    )
    rows = sorted((row for row in spark_rows(messages) if row["target"] >= 0), key=lambda row: row["sequence"])
    columns = [[row[name] for row in rows] for name in COLUMNS]
    found: dict[tuple[str, str], Change] = {}
    for spec, states in zip(SPECS, fold.fold_from_nothing([columns]), strict=True):
        for key, state in states.items():
            if (change := state.change(spec, key)) is not None:
                found[spec.name, key] = change
    return found


@pytest.mark.parametrize("seed", seeds.tried(range(60), 15))
def test_live_engines_and_spark_store_the_same_bytes(seed: int) -> None:
    messages = some_batch(seed)
    assert changes_of_spark(messages) == changes_of_live(messages), seeds.again(seed)


def test_states_are_deleted_stuck_and_kept_by_the_junk() -> None:
    found = [change for seed in range(60) for change in changes_of_live(some_batch(seed)).values()]
    assert any(change.operation == "delete" for change in found)
    assert any(" parked " in (change.mark or "") for change in found)
    assert any(" unique " in (change.mark or "") for change in found)
    assert any(b'"lookups"' in change.value for change in found)
