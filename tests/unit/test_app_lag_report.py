"""The report as programs and people read it, and positions read from checkpoints of Spark."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from jetspark.app.lag import (
    DeadLetterLag,
    LagMonitor,
    LagOutlook,
    LagPart,
    LagReport,
    LagRow,
    PositionReader,
    checkpoint_readers,
)
from jetspark.cli.lag import duration
from jetspark.errors import ConfigError
from jetspark.spark.offsets import Offset, StreamPosition

GOLDEN = Path(__file__).parent / "golden_lag_report.json"
AT = datetime.datetime(2026, 3, 20, 10, 14, 30, 250_000, tzinfo=datetime.UTC)

ROWS = [
    LagRow(kind="projection", name="calm", stream="S", messages=0, seconds=0.0, parts={"waiting": LagPart(0, 0.0)}),
    LagRow(kind="consumer", name="gone", stream="S", unknown="no answer within 5.0 s"),
    LagRow(kind="consumer", name="ageless", stream="S", messages=900, parts={"waiting": LagPart(900, None)}),
    LagRow(kind="consumer", name="many", stream="S", messages=90, seconds=4.0),
    LagRow(kind="consumer", name="few", stream="S", messages=9, seconds=4.0),
    LagRow(
        kind="handler",
        name="old",
        stream="S",
        messages=3,
        seconds=3600.12345,
        parts={"waiting": LagPart(1, 0.5), "scheduled": LagPart(2, 3600.12345)},
        is_paused=True,
        notes=("remark",),
        outlook=LagOutlook(
            messages_per_s=-0.1, caught_up_in_s=30.0, overtaken_in_s=12.5, overtaken_by="max_age", kept_for_s=12.5
        ),
    ),
]
REPORT = LagReport.of(
    AT,
    "shop",
    ROWS,
    [
        DeadLetterLag(name="projections", messages=0, seconds=0.0, parked_keys=None),
        DeadLetterLag(name="old", messages=2, seconds=7200.5, parked_keys=1),
    ],
)


def test_the_furthest_behind_comes_first() -> None:
    assert [row.name for row in REPORT.rows] == ["old", "many", "few", "ageless", "gone", "calm"]


def test_the_json_form_is_stable() -> None:
    """Programs read it: a field may be added, and a change of another one is a new version of the schema."""
    assert REPORT.to_dict() == json.loads(GOLDEN.read_text(encoding="utf-8"))


def test_a_row_is_found_by_its_name() -> None:
    assert REPORT.row("old").messages == 3
    with pytest.raises(KeyError):
        REPORT.row("old", kind="projection")
    assert not REPORT.is_complete


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "?"),
        (0.0, "-"),
        (0.04, "0.0s"),
        (9.94, "9.9s"),
        (59.4, "59s"),
        (59.6, "1m00s"),
        (200, "3m20s"),
        (3600, "1h00m"),
        (7500, "2h05m"),
        (273_600, "3d04h"),
    ],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


# ---- checkpoints -----------------------------------------------------------------------------------------------------


def _checkpoint(folder: Path, batches: dict[int, list[str]], done: list[int]) -> Path:
    for name in ("offsets", "commits"):
        (folder / name).mkdir(parents=True)
    for number, lines in batches.items():
        (folder / "offsets" / str(number)).write_text("\n".join(["v1", '{"batchWatermarkMs":0}', *lines]))
    for number in done:
        (folder / "commits" / str(number)).write_text('v1\n{"nextBatchWatermarkMs":0}')
        (folder / "commits" / f".{number}.crc").touch()
    return folder


def _line(next: int, stream: str = "S", subjects: tuple[str, ...] = ()) -> str:
    offset = Offset({stream: StreamPosition("2026-03-20T00:00:00Z", next)}, 100, subjects)
    return json.dumps(offset.to_json())


def _reader(next: int, stream: str = "S", *filters: str) -> PositionReader:
    return PositionReader(
        kind="spark", name="query", stream=stream, next=next, created="2026-03-20T00:00:00Z", filters=filters
    )


def test_a_checkpoint_is_read_up_to_its_last_complete_batch(tmp_path: Path) -> None:
    batches = {8: [_line(80)], 9: [_line(90)], 10: [_line(100)], 11: [_line(110)]}
    folder = _checkpoint(tmp_path / "query", batches, [8, 9, 10])
    assert checkpoint_readers(folder) == [_reader(100)]
    assert checkpoint_readers(str(folder), name="mine")[0].name == "mine"


def test_each_jetstream_source_of_a_query_is_a_reader(tmp_path: Path) -> None:
    lines = [_line(5, "S", ("a.>", "b")), "-", '{"logOffset":3}', "17", _line(7, "KV_state", ("key.*",))]
    folder = _checkpoint(tmp_path / "query", {0: lines}, [0])
    assert checkpoint_readers(folder) == [_reader(5, "S", "a.>", "b"), _reader(7, "KV_state", "$KV.*.key.*")]


@pytest.mark.parametrize(
    ("lines", "done", "expected"),
    [
        (None, [], "expected a folder with offsets"),
        ([_line(5)], [], "expected a folder with offsets"),
        (['{"logOffset":3}'], [0], "no source of the query is JetStream"),
        (['{"version":2,"streams":{"S":{}},"subjects":[]}'], [0], "its offset cannot be read"),
        (["{"], [0], "its offset cannot be read"),
    ],
)
def test_a_folder_that_is_no_checkpoint_is_refused(
    lines: list[str] | None, done: list[int], expected: str, tmp_path: Path
) -> None:
    folder = tmp_path / "query"
    if lines is not None:
        _checkpoint(folder, {0: lines}, done)
    with pytest.raises(ConfigError, match=expected):
        checkpoint_readers(folder)


@pytest.mark.parametrize("streams", ["S", ["a b"], [3], 7])
def test_names_of_streams_are_checked(streams: Any) -> None:
    with pytest.raises(ConfigError, match="streams"):
        LagMonitor(None, streams=streams)  # type: ignore[arg-type]
