"""Load a CSV file into a stream, once, even if the import is started again, on this machine or another one.

The id of each message is derived from the data (file and line), not from the run. So the next run does not store
the rows of an interrupted one again, within the duplicate window of the stream.
"""

import argparse
import contextlib
import csv
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jetspark.blocking as jetspark
from jetspark import StreamConfig
from jetspark.server import NatsServer


def rows(path: Path) -> Iterator[tuple[str, bytes, dict[str, str]]]:
    """Subject, data and headers of each row."""
    with path.open(newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), 2):
            headers = {"Nats-Msg-Id": f"{path.name}:{line}"}
            yield f"sales.{row['shop']}", json.dumps(row, sort_keys=True).encode(), headers


def load(servers: str, path: Path) -> int:
    with jetspark.connect(servers) as nc:
        js = nc.jetstream()
        stream = js.create_or_update_stream(
            StreamConfig(name="SALES", subjects=["sales.*"], allow_batched=True, duplicate_window_s=24 * 3600)
        )
        with js.fast_publisher(message_ids=True) as publisher:  # leaving the block waits until all is stored
            publisher.publish_many(rows(path))
        return stream.info().state.messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="with a column 'shop'; without it, one is made up")
    parser.add_argument("--servers", help="where NATS is; without it, a server is started for this run")
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        servers = options.servers or stack.enter_context(NatsServer()).url
        path = options.file
        if path is None:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "sales.csv"
            path.write_text("shop,cents\n" + "".join(f"shop{n % 7},{n}\n" for n in range(20_000)), encoding="utf-8")
        print("stored:", load(servers, path))
        print("stored after a second run:", load(servers, path))


if __name__ == "__main__":
    main()
