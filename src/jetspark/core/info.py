"""The fields of a server's INFO, and the meaning of its -ERR texts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jetspark.errors import PermissionDenied

__all__ = ["ServerInfo", "is_about_credentials", "parse_permission_denied"]

# The server's default, in force until INFO says otherwise.
DEFAULT_MAX_PAYLOAD_BYTES = 1 << 20

# The texts of nats-server for missing, wrong or expired credentials.
# "Authentication Timeout" is a busy server, not a wrong secret.
_AUTHENTICATION_TEXT = re.compile(r"(authorization|authentication)(?! timeout)", re.IGNORECASE)
_PERMISSION_TEXT = re.compile(
    r'permissions violation for (publish|subscription) to "((?:[^"\\]|\\.)*)"(?: using queue "((?:[^"\\]|\\.)*)")?',
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The server's INFO; ``fields`` has all of it."""

    fields: Mapping[str, Any] = field(default_factory=dict, repr=False)
    name: str = ""
    version: str = ""
    max_payload_bytes: int = DEFAULT_MAX_PAYLOAD_BYTES
    client_id: int = 0
    cluster: str = ""
    has_jetstream: bool = False
    requires_tls: bool = False
    is_lame_duck: bool = False
    nonce: str | None = None

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> ServerInfo:
        return cls(
            fields=fields,
            name=str(fields.get("server_name", "")),
            version=str(fields.get("version", "")),
            max_payload_bytes=int(fields.get("max_payload", DEFAULT_MAX_PAYLOAD_BYTES)),
            client_id=int(fields.get("client_id", 0)),
            cluster=str(fields.get("cluster", "")),
            has_jetstream=bool(fields.get("jetstream")),
            requires_tls=bool(fields.get("tls_required")),
            is_lame_duck=bool(fields.get("ldm")),
            nonce=_text_or_none(fields.get("nonce")),
        )


def is_about_credentials(text: str) -> bool:
    """True if the server refuses our credentials, as opposed to something about the connection."""
    return _AUTHENTICATION_TEXT.search(text) is not None


def parse_permission_denied(text: str) -> tuple[PermissionDenied, str] | None:
    """The denied operation and subject, and the queue group in the text (empty without one)."""
    found = _PERMISSION_TEXT.search(text)
    if found is None:
        return None
    operation = "publish" if found[1].lower() == "publish" else "subscribe"
    return PermissionDenied(operation, _unquoted(found[2])), _unquoted(found[3] or "")


def _unquoted(text: str) -> str:
    return re.sub(r"\\(.)", r"\1", text)  # the server quotes as Go does


def _text_or_none(value: object) -> str | None:
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"nonce of type {type(value).__name__}")
