"""A relational database behind a Batcher: one transaction for each batch, and no duplicate rows after retries.

The primary key makes it idempotent: an existing row stays unchanged. So a batch may be written again after an error,
even if it is unknown whether the error came before or after the commit.
"""

import sqlite3
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jetspark.batcher.blocking import Batcher, BatcherConfig, MeteredSink, RetrySink


class Reading(NamedTuple):
    id: str
    sensor: str
    celsius: float


class TableSink:
    """Writes batches of readings; any thread may call."""

    def __init__(self, path: Path) -> None:
        # Autocommit, so that BEGIN and COMMIT are where we write them. The lock makes it safe to share.
        self._database = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        self._lock = threading.Lock()
        self._database.execute("CREATE TABLE IF NOT EXISTS reading (id TEXT PRIMARY KEY, sensor TEXT, celsius REAL)")

    def write(self, batch: Sequence[Reading]) -> None:
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                self._database.executemany("INSERT INTO reading VALUES (?, ?, ?) ON CONFLICT (id) DO NOTHING", batch)
                self._database.execute("COMMIT")
            except BaseException:
                self._database.execute("ROLLBACK")
                raise

    def is_retryable(self, error: Exception) -> bool:
        """A locked database is free again soon; a row that breaks a rule of the table breaks it again."""
        return isinstance(error, sqlite3.OperationalError)

    def close(self) -> None:
        self._database.close()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "readings.db"
        table = TableSink(path)
        metered = MeteredSink(table)
        sink = RetrySink(metered, attempts=50, first_wait_s=0.01, max_wait_s=0.05)

        # Another program locks the database for a while, as a backup would.
        other = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        other.execute("BEGIN EXCLUSIVE")
        threading.Timer(0.2, other.execute, ["COMMIT"]).start()

        began = time.monotonic()
        with Batcher(BatcherConfig(sink=sink, max_batch_size=100, max_batch_delay=0.05, name="readings")) as batcher:
            for number in range(1_000):
                batcher.add(Reading(f"r{number}", f"s{number % 7}", 20 + number / 100))
            for number in range(0, 1_000, 3):  # the same events again, as a source that was restarted would give them
                batcher.add(Reading(f"r{number}", f"s{number % 7}", 20 + number / 100))
        stats = metered.stats()
        print(f"{stats.writes} writes in {time.monotonic() - began:.2f} s, {stats.failed_writes} met a locked database")

        rows = other.execute("SELECT count(*), count(DISTINCT id) FROM reading").fetchone()
        print("rows, distinct ids:", rows)
        other.close()
        table.close()
        assert rows == (1_000, 1_000)
        assert stats.failed_writes > 0


main()
