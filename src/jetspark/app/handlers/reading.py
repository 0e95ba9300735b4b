"""What a message is to a handler: an event and its key, or why it is none. Pure.

A message that cannot be read has a key all the same, as far as that can be told: later events of the key must not pass
it, and when it is redriven, by code that can read it, it has to be in order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jetspark.app.contracts.catalogue import Catalogue, contract_of
from jetspark.app.contracts.envelope import RawHeaders, decode, read_key
from jetspark.app.contracts.faults import user_errors
from jetspark.app.contracts.tokens import key_fault, text_of
from jetspark.app.handlers.retry import Reject
from jetspark.errors import ConfigError, ContractViolation

if TYPE_CHECKING:
    from jetspark.app.handlers.handler_spec import HandlerSpec

__all__ = ["HandlerReading"]


class HandlerReading:
    """Reads messages for one handler; without ``keyed`` none of them has a key."""

    def __init__(self, spec: HandlerSpec, catalogue: Catalogue, *, keyed: bool) -> None:
        self._spec, self._catalogue, self._keyed = spec, catalogue, keyed
        self._kinds = frozenset(spec.events)
        self._contracts = [contract_of(kind) for kind in spec.events]

    def read(self, subject: str, data: bytes, headers: RawHeaders) -> tuple[Any, str | None]:
        """The event, or the error that says why it is none; and its key, None for none."""
        return _checked(*self._read(subject, data, headers))

    def unread(self, error: Exception, subject: str, data: bytes, headers: RawHeaders) -> tuple[Exception, str | None]:
        """What :meth:`read` returns of a message that must not be decoded, because of ``error``: runs no user code."""
        return _checked(error, self._key_of_unreadable(subject, data, headers) if self._keyed else None)

    def _read(self, subject: str, data: bytes, headers: RawHeaders) -> tuple[Any, str | None]:
        try:
            decoded = decode(subject, data, headers, self._catalogue)
        except ContractViolation as error:
            return error, self._key_of_unreadable(subject, data, headers) if self._keyed else None
        if not self._keyed:
            return decoded, None
        spec = self._spec
        if spec.key is None or decoded.contract.kind not in self._kinds:
            return decoded, decoded.key
        try:
            if isinstance(spec.key, str):
                return decoded, _as_text(getattr(decoded.event, spec.key))
            return decoded, _as_text(spec.key(decoded.event))
        except user_errors() as error:  # it must not end the worker, which would get the event again
            return Reject(f"key={spec.key!r} of handler {spec.name!r} cannot be told of this event: {error}"), None

    def _key_of_unreadable(self, subject: str, data: bytes, headers: RawHeaders) -> str | None:
        """By the envelope, else by the subject. A key that is a function of the event cannot be told."""
        own = self._spec.key
        if own is not None and not isinstance(own, str):
            return None
        candidates = [each for each in self._contracts if each.subject.values_of(subject) is not None]
        # The envelope names the key of the event, which that of the handler need not be.
        if own is None or (candidates and all(each.key == own for each in candidates)):
            named = read_key(data, headers)
            if named is not None:
                return named
        if own is None:
            found = {each.key_in(subject) for each in candidates}
        else:
            found = {(each.subject.values_of(subject) or {}).get(own) for each in candidates}
        found.discard(None)
        return found.pop() if len(found) == 1 else None  # two types that disagree tell nothing


def _checked(event: Any, key: str | None) -> tuple[Any, str | None]:
    if key is None or (fault := key_fault(key)) is None:
        return event, key
    # There could be no letter under this key.
    return event if isinstance(event, Exception) else Reject(f"it cannot be kept in order: {fault}"), None


def _as_text(key: Any) -> str | None:
    """A key as text: as it is in a subject, where it can be in one."""
    if key is None or key.__class__ is str:
        return key
    try:
        return text_of(key)
    except ConfigError:
        return str(key)
