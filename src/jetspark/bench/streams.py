"""A stream for one measurement: made before the clock starts, checked after it stopped, and gone then."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from jetspark.bench.workload import Job
from jetspark.blocking import connect
from jetspark.errors import ConnectionLost

__all__ = ["stream_for"]


@contextlib.contextmanager
def stream_for(job: Job, **config: Any) -> Iterator[None]:
    """In a file, one replica. When the block ends it has stored exactly what was published, or that is an error."""
    name = job.subject.replace(".", "-")
    body = {"name": name, "subjects": [job.subject], "storage": "file", "num_replicas": 1, "retention": "limits"}
    with connect(job.url) as client:
        reply = json.loads(client.request(f"$JS.API.STREAM.CREATE.{name}", json.dumps(body | config).encode()).data)
        if "error" in reply:
            raise ConnectionLost(f"no stream: {reply['error']}")
        try:
            yield
            info = json.loads(client.request(f"$JS.API.STREAM.INFO.{name}").data)
            if info["state"]["messages"] != job.warmup + job.count:
                raise ConnectionLost(f"{info['state']['messages']} stored of {job.warmup + job.count}")
        finally:
            client.request(f"$JS.API.STREAM.DELETE.{name}")
