"""Events of an application as DataFrames: a column for each field, and ``_event`` for the envelope."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

from jetspark.app import App
from jetspark.app.columns import ENVELOPE, UNREADABLE
from jetspark.errors import ConfigError
from jetspark.spark.engine.app_files import load_app, locate_app
from jetspark.spark.engine.projection_options import ReadingKeywords, servers_text, source_options
from jetspark.spark.formats import register
from jetspark.spark.typed.event_options import FORMAT, contracts_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation, SparkSession

__all__ = ["EventKeywords", "events", "stream_events"]


class EventKeywords(ReadingKeywords, total=False):
    """Options of the format ``jetstream`` as keywords, and ``filtered``, for type checkers."""

    stream: str | Sequence[str]
    streamPattern: str
    subjects: str | Sequence[str]
    filtered: bool | str
    startingOffsets: int | str | Mapping[str, int | str]
    startingTimestamp: int | str
    endingOffsets: int | str | Mapping[str, int | str]
    endingTimestamp: int | str


def events(
    spark: SparkSession,
    app: App | str,
    *kinds: type[object],
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    unreadable: str = "fail",
    observation: Observation | None = None,
    **options: Unpack[EventKeywords],
) -> DataFrame:
    """Events of an application that are stored now, as a DataFrame.

    One type has a column for each of its fields; several types have one struct column each, called as the type with
    ``_`` for dots, and the column ``type``. The struct ``_event`` has id, key, time, type, version, source,
    correlation and causation of the event, and subject, sequence, stream and time (``stored``) of its message. Data of
    older versions are upcast. docs/spark-events.md has the column type of each field.

    Args:
        app: The application, or its location ``package.module:name``. Spark's workers import it.
        kinds: Classes of events that the application declares.
        unreadable: A message on the subjects of the types that is not a valid event: ``"fail"`` the read, ``"drop"``
            it, or ``"keep"`` it as a row whose column ``_unreadable`` has the error, the reason and the raw data.
        observation: Receives the counts ``rows`` and ``unreadable``, and the sequence ``first_unreadable``, with
            ``"drop"`` and ``"keep"``.
        options: Options of the format ``jetstream``, such as ``startingTimestamp`` and ``credentialsFile``; and
            ``filtered=True`` for types that are a small part of the stream.

    Raises:
        ConfigError: An option is invalid, workers cannot import the application, or a field has no column type.
    """
    if observation is not None and unreadable == "fail":
        raise ConfigError("observation: expected with unreadable='drop' or 'keep'; with 'fail' nothing is left out")
    reader = spark.read.format(FORMAT).options(**_options(spark, app, kinds, servers, unreadable, options))
    return _counted(reader.load(), unreadable, observation)


def stream_events(
    spark: SparkSession,
    app: App | str,
    *kinds: type[object],
    servers: str | Sequence[str] = "nats://127.0.0.1:4222",
    unreadable: str = "fail",
    metrics_name: str | None = None,
    **options: Unpack[EventKeywords],
) -> DataFrame:
    """Events of an application as a streaming DataFrame; the columns and arguments of :func:`events`.

    Args:
        metrics_name: With ``unreadable="drop"`` and ``"keep"`` the progress of a query has the counts of
            :func:`events` in ``observedMetrics`` under this name, by default ``jetstream_events:`` and the types. Two
            reads in one query need different names.

    Raises:
        ConfigError: As :func:`events`.
    """
    given = _options(spark, app, kinds, servers, unreadable, options)
    frame = spark.readStream.format(FORMAT).options(**given).load()
    return _counted(frame, unreadable, metrics_name or f"{FORMAT}:{given['type']}")


def _options(
    spark: SparkSession,
    app: App | str,
    kinds: Sequence[type[object]],
    servers: str | Sequence[str],
    unreadable: str,
    more: Mapping[str, Any],
) -> dict[str, str]:
    location = locate_app(app)
    declared = load_app(location.name, location.folder) if isinstance(app, str) else app
    if not kinds:
        known = ", ".join(each.kind.__name__ for each in declared.catalogue)
        raise ConfigError(f"expected one or more classes of events; app {declared.name!r} declares {known}")
    types = tuple(dict.fromkeys(declared.catalogue.declared(kind).type for kind in kinds))
    others = [each for each in contracts_of(declared, types) if each.kind not in kinds]
    if others:
        other = others[0]
        raise ConfigError(
            f"{other.type!r} also has events of version {other.version}, which are read as {other.kind.__name__} and "
            f"would be left out; name this class, too, or write an upcast from version {other.version}"
        )
    register(spark)
    given = source_options(more)
    given |= {"servers": servers_text(servers), "app": location.name, "type": ",".join(types), "unreadable": unreadable}
    # Rows are dropped by Spark, where they can be counted: a Python source has no metrics of its own.
    given["unreadable"] = "keep" if unreadable == "drop" else unreadable
    if location.folder:
        given["appFolder"] = location.folder
    return given


def _counted(frame: DataFrame, unreadable: str, observed_as: str | Observation | None) -> DataFrame:
    if unreadable == "fail":
        return frame
    from pyspark.sql import functions as F

    is_row = F.col(UNREADABLE).isNull()
    if observed_as is not None:
        frame = frame.observe(
            observed_as,
            F.count_if(is_row).alias("rows"),
            F.count_if(~is_row).alias("unreadable"),
            F.min(F.when(~is_row, F.col(f"{ENVELOPE}.sequence"))).alias("first_unreadable"),
        )
    return frame.where(is_row).drop(UNREADABLE) if unreadable == "drop" else frame
