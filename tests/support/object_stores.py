"""A real S3 server in this process (moto), which can be made to fail: the store of archives in tests."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Fault", "S3Server", "s3_server"]

Fault = Literal["", "409 before", "503 before", "503 after", "cut before", "cut after"]
"""What happens to a request: an error as its answer, or a cut connection, before or after the server has done it."""


@dataclass
class S3Server:
    """One bucket, ``lake``."""

    endpoint: str = ""
    fault: Callable[[str, str], Fault] = lambda method, path: ""
    """Chooses the fault of a request, by its method and its path with the query."""
    ignores_conditions: bool = False
    """True for a store that takes a conditional write as any other, as `rclone serve s3` does."""
    requests: list[str] = field(default_factory=list)

    @property
    def options(self) -> dict[str, str]:
        return {
            "aws_endpoint": self.endpoint,
            "aws_access_key_id": "test-key-id",
            "aws_secret_access_key": "test-secret-key",
            "aws_region": "us-east-1",
        }

    def failing_once(self, method: str, part_of_path: str, fault: Fault, *, times: int = 1) -> list[str]:
        """Make the next requests of this kind fail. Returns the list of those that have."""
        failed: list[str] = []

        def choose(each_method: str, path: str) -> Fault:
            if each_method == method and part_of_path in path and len(failed) < times:
                failed.append(path)
                return fault
            return ""

        self.fault = choose
        return failed


@contextlib.contextmanager
def s3_server() -> Iterator[S3Server]:
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    inner = DomainDispatcherApplication(create_backend_app)
    server, lock = S3Server(), threading.Lock()

    def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        method = environ["REQUEST_METHOD"]
        path = environ["PATH_INFO"] + (f"?{environ['QUERY_STRING']}" if environ["QUERY_STRING"] else "")
        server.requests.append(f"{method} {path}")
        fault = server.fault(method, path)
        if fault.endswith("before"):
            return _fail(fault, environ, start_response)
        if server.ignores_conditions:
            environ.pop("HTTP_IF_NONE_MATCH", None)
        # moto looks for the object and then stores it: two writers at the same moment would both succeed.
        with lock if "HTTP_IF_NONE_MATCH" in environ else contextlib.nullcontext():
            body = list(inner(environ, (lambda *_, **__: None) if fault else start_response))
        return _fail(fault, environ, start_response) if fault else body

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

        def log(self, *_: Any, **__: Any) -> None:
            pass

    http = make_server("127.0.0.1", 0, application, threaded=True, request_handler=Handler)
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    server.endpoint = f"http://127.0.0.1:{http.server_port}"
    try:
        _request(server.endpoint, "POST", "/moto-api/reset")
        _request(server.endpoint, "PUT", "/lake")
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join(10)


def _fail(fault: str, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
    if fault.startswith("cut"):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
        raise ConnectionAbortedError
    status = {"409": "409 Conflict", "503": "503 Slow Down"}[fault.partition(" ")[0]]
    start_response(status, [("Content-Type", "application/xml"), ("Content-Length", "0")])
    return [b""]


def _request(endpoint: str, method: str, path: str) -> None:
    import urllib.request

    with urllib.request.urlopen(urllib.request.Request(endpoint + path, method=method), timeout=10):
        pass
