"""An HTTP bulk endpoint behind a Batcher: it is busy at times, and refuses some items of a batch and takes the others.

The endpoint takes JSON lines and answers which of them it refused, and why. A failed request is sent again, which is
safe because the endpoint identifies documents by id. Refused documents would be refused again: they go to a file.
"""

import asyncio
import json
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from jetspark.batcher import Batcher, BatcherConfig, CircuitBreakerSink, DeadLetter, FileSink, RetrySink, Sink

Document = dict[str, Any]


class Busy(Exception):
    """The endpoint requests a retry later; `RetrySink` and other wrappers use ``retry_in_s``."""

    def __init__(self, retry_in_s: float) -> None:
        super().__init__(retry_in_s)
        self.retry_in_s = retry_in_s


class BadRequest(Exception):
    """The endpoint refused the request as invalid; a retry would fail, too."""

    is_retryable = False


class Refused(Exception):
    """The endpoint's reason for refusing a document."""


class BulkSink:
    """Sends a batch as one request. Refused documents are written to ``refused``; only then is the batch safe."""

    def __init__(self, url: str, refused: Sink[DeadLetter[Document]], timeout_s: float = 5.0) -> None:
        self._url, self._refused, self._timeout_s = url, refused, timeout_s

    async def write(self, batch: Sequence[Document]) -> None:
        body = "".join(json.dumps(document) + "\n" for document in batch).encode()
        answer = await asyncio.to_thread(self._send, body)
        now = time.time()
        dead = [DeadLetter(batch[entry["index"]], Refused(entry["error"]), now) for entry in answer["refused"]]
        if dead:
            # If this fails, the whole batch is sent again; the endpoint recognises stored documents.
            await self._refused.write(dead)

    def _send(self, body: bytes) -> Any:
        request = urllib.request.Request(self._url, body, {"Content-Type": "application/x-ndjson"})
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s) as response:
                return json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                if error.code in (429, 503):
                    raise Busy(float(error.headers.get("Retry-After", 1))) from None
                if 400 <= error.code < 500:
                    raise BadRequest(f"{error.code} {error.reason}") from None
                raise  # an OSError, as is a refused connection or a timeout: worth another attempt


class Endpoint(BaseHTTPRequestHandler):
    """The other side: keeps documents by id, refuses those without a price, and is busy every third time."""

    documents: dict[str, Document] = {}  # noqa: RUF012 - there is one endpoint
    requests = 0

    def do_POST(self) -> None:
        lines = self.rfile.read(int(self.headers["Content-Length"])).splitlines()
        Endpoint.requests += 1
        if Endpoint.requests % 3 == 1:
            self._answer(503, {}, {"Retry-After": "0.05"})
            return
        refused = []
        for index, line in enumerate(lines):
            document = json.loads(line)
            if "price" in document:
                self.documents[document["id"]] = document
            else:
                refused.append({"index": index, "error": "no price"})
        self._answer(200, {"refused": refused}, {})

    def _answer(self, code: int, body: Any, headers: dict[str, str]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


async def main(url: str, dead_letters: Path) -> None:
    async with FileSink[DeadLetter[Document]](dead_letters) as refused:
        sink = RetrySink(
            CircuitBreakerSink(BulkSink(url, refused), failures=5, open_s=1.0),
            first_wait_s=0.01,
            max_total_s=4.0,  # less than the batcher's flush_timeout, which is 5
        )
        async with Batcher(
            BatcherConfig(sink=sink, max_batch_size=50, max_batch_delay=0.02, name="documents")
        ) as batcher:
            for number in range(500):
                document = {"id": f"d{number}", "price": number}
                if number % 100 == 42:
                    del document["price"]
                await batcher.add(document)
        print(batcher.stats())
        assert batcher.stats().flushed_ok == 500


with ThreadingHTTPServer(("127.0.0.1", 0), Endpoint) as server, tempfile.TemporaryDirectory() as folder:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    path = Path(folder) / "refused.jsonl"
    asyncio.run(main(f"http://127.0.0.1:{server.server_port}/bulk", path))
    server.shutdown()
    refused = [json.loads(line) for line in path.read_text().splitlines()]
    print(len(Endpoint.documents), "taken by", Endpoint.requests, "requests;", len(refused), "refused:", refused[0])
    assert len(Endpoint.documents) == 495
    assert {entry["item"]["id"] for entry in refused} == {"d42", "d142", "d242", "d342", "d442"}
