"""Settings and feature flags: declared with a type, a default, and what holds when one is deleted.

A setting is a key of a bucket, ``<scope>.<name>`` or ``<name>``. It holds JSON with the value, who set it, and when::

    {"at": "2026-03-31T10:15:30+00:00", "by": "ann", "value": "EUR"}

without ``value`` for a setting that a named person removed. Every revision stays in the history of the bucket, which is
the audit. :class:`Settings` is a copy in memory, kept up to date by a watch: reading it is free, never waits, and never
fails for a missing or unreadable key, because every setting has a default.

A flag is on for ``rollout`` of a hundred parts of its units. A unit's part is the first eight bytes of the SHA-256 of
``<flag>/<unit>``, modulo 100: the same in every program, permanently, and independent for each flag.
"""

from __future__ import annotations

import asyncio
import datetime
import hashlib
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Literal, NamedTuple, Self, TypeAlias, TypeVar, cast

import msgspec

from jetspark.aio import clock
from jetspark.app.clock import utc_now
from jetspark.app.finite_json import check_finite
from jetspark.app.patience import UNLIMITED_S, patiently
from jetspark.app.topology.names import check_app_name
from jetspark.core.backoff import Backoff
from jetspark.core.numbers import seconds
from jetspark.errors import ConfigError, JetSparkError, KeyNotFound, RequestTimeout
from jetspark.jetstream.kv import KVConfig, KVEntry, check_key

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from jetspark.aio.kv import KeyValue

__all__ = ["Flag", "FlagValue", "Setting", "SettingChange", "Settings", "SettingsSpec"]

_logger = logging.getLogger("jetspark.app")

T = TypeVar("T")

HISTORY = 16
"""Revisions of a setting that a bucket keeps by default."""
PARTS = 100
# A watch that ended is opened again after this time.
PAUSE = Backoff(first_s=0.5, max_s=0.5)

OnDelete: TypeAlias = Literal["default", "keep"]
OnChange: TypeAlias = Callable[[Any, Any], object]
"""Called with the new value and the previous one."""


class Setting(Generic[T]):
    """The declaration of a setting: its type, its default, and its value after a deletion.

    Args:
        type: What a value is read as and checked against: anything that msgspec can read from JSON.
        default: The value while none is set.
        on_delete: ``"default"``: a deleted setting returns to its default. ``"keep"``: it keeps its last value.
    """

    def __init__(self, type: type[T], default: T, *, on_delete: OnDelete = "default") -> None:
        if on_delete not in ("default", "keep"):
            raise ConfigError(f"on_delete={on_delete!r}: expected 'default' or 'keep'")
        self.type, self.default, self.on_delete = type, default, on_delete
        self.check(default)

    def check(self, value: object) -> T:
        """The value, if it is one of the setting's.

        Raises:
            ConfigError: The value does not match the type.
        """
        try:
            data = msgspec.json.encode(value)
            check_finite("the value", value, data)
            return self.read(data)
        except (msgspec.MsgspecError, TypeError, ValueError) as error:
            raise ConfigError(f"{value!r}: expected a value of type {self.type}: {error}") from error

    def read(self, value: bytes) -> T:
        return msgspec.json.decode(value, type=self.type)


class FlagValue(msgspec.Struct, frozen=True):
    """A flag's value: whether it is on at all, and for how many of a hundred units."""

    enabled: bool = False
    rollout: int = 100

    def __post_init__(self) -> None:
        if not isinstance(self.rollout, int) or not 0 <= self.rollout <= PARTS:
            raise ValueError(f"rollout={self.rollout!r}: expected 0 to {PARTS}")


class Flag(Setting[FlagValue]):
    """A feature flag; off by default."""

    def __init__(self, default: FlagValue = FlagValue(rollout=0), *, on_delete: OnDelete = "default") -> None:  # noqa: B008
        super().__init__(FlagValue, default, on_delete=on_delete)


class SettingsSpec:
    """Settings as they were declared; see ``App.settings``."""

    def __init__(self, bucket: KVConfig | str, settings: Mapping[str, Setting[Any]]) -> None:
        config = KVConfig.of(bucket)
        if config.ttl_s:
            raise ConfigError(
                f"ttl_s={config.ttl_s} of bucket {config.bucket}: must not be set, since settings do not expire"
            )
        history = config.history if isinstance(bucket, KVConfig) else HISTORY
        self.bucket = config if isinstance(bucket, KVConfig) else KVConfig(bucket=config.bucket, history=history)
        if not settings:
            raise ConfigError(f"settings of bucket {config.bucket}: expected at least one")
        for name, setting in settings.items():
            check_app_name(name)
            if not isinstance(setting, Setting):
                raise ConfigError(f"{name}={setting!r}: expected a Setting or a Flag")
            if setting.on_delete == "keep" and (self.bucket.history or 1) < 2:
                raise ConfigError(
                    f"{name}: on_delete='keep' needs a bucket with history=2 or more, to find the last value"
                )
        self.settings = dict(settings)

    def setting(self, name: str) -> Setting[Any]:
        found = self.settings.get(name)
        if found is None:
            raise ConfigError(f"setting {name!r}: expected one of {', '.join(sorted(self.settings))}")
        return found


class SettingChange(NamedTuple):
    """A revision of a setting."""

    name: str
    value: Any
    """None if the setting was deleted, or its value cannot be read."""
    is_deleted: bool
    by: str
    """The author of the change; empty if the program that made it gave none."""
    at: datetime.datetime
    """The time when the bucket stored it."""
    revision: int
    error: str = ""
    """Why the value cannot be read."""


class Settings:
    """The settings of one scope, in memory: ``async with client.settings("shop", scope="acme") as settings``.

    Args:
        max_stale_s: Reading raises when the copy was not compared with the server for this long. By default the last
            known values stay valid while the server is away.
    """

    def __init__(
        self,
        spec: SettingsSpec,
        open_bucket: Callable[[], Awaitable[KeyValue]],
        *,
        scope: str = "",
        max_stale_s: float | None = None,
    ) -> None:
        self._spec, self._open_bucket = spec, open_bucket
        self._scope = f"{check_key(scope)}." if scope else ""
        self._max_stale_s = None if max_stale_s is None else seconds("max_stale_s", max_stale_s)
        self._values = {name: setting.default for name, setting in spec.settings.items()}
        self._revision = 0
        self._stored: dict[str, int] = {}
        """Settings that the bucket has something for, and its revision."""
        self._fresh_at = 0.0
        self.errors: dict[str, str] = {}
        """Settings whose stored value cannot be read as their type; what held before holds."""
        self._callbacks: dict[str, list[OnChange]] = {}
        self._kv: KeyValue
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        self._kv = await self._open_bucket()
        ready = asyncio.get_running_loop().create_future()
        self._tasks = [asyncio.create_task(self._follow(ready))]
        try:
            await asyncio.wait([ready, self._tasks[0]], return_when=asyncio.FIRST_COMPLETED)
            if self._tasks[0].done():
                self._tasks[0].result()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        if self._max_stale_s is not None:
            self._tasks.append(asyncio.create_task(self._compare(self._max_stale_s / 3)))
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    # ---- reading -----------------------------------------------------------------------------------------------

    def get(self, name: str) -> Any:
        """The value of a setting, of its declared type. Values are shared: do not change one.

        Raises:
            ConfigError: The setting is not declared.
            RequestTimeout: The copy is older than ``max_stale_s``.
            JetSparkError: Following the bucket has failed for good: it was deleted, for instance.
        """
        self._spec.setting(name)
        if self._tasks and self._tasks[0].done() and not self._tasks[0].cancelled():
            self._tasks[0].result()  # following the bucket has failed for good: it raises why
        if self._max_stale_s is not None and (stale_s := self.stale_s) > self._max_stale_s:
            what = f"settings of bucket {self._spec.bucket.bucket}, which are as they were {stale_s:.1f} s ago"
            raise RequestTimeout(what, self._max_stale_s)
        return self._values[name]

    def is_on(self, flag: str, unit: object = "") -> bool:
        """True if a flag is on for a unit such as a user's id; the same unit always gets the same answer.

        Without a unit, a flag that is rolled out to less than everybody is off.
        """
        value = self.get(flag)
        if not isinstance(value, FlagValue):
            raise ConfigError(f"is_on({flag!r}): expected a Flag, and it is a setting of type {type(value).__name__}")
        if not value.enabled or value.rollout <= 0:
            return False
        return value.rollout >= PARTS or (unit != "" and part_of(flag, unit) < value.rollout)

    @property
    def stale_s(self) -> float:
        """Seconds since the copy was last known to be what the server has."""
        return clock.now() - self._fresh_at

    def on_change(self, name: str, callback: OnChange) -> None:
        """Have a function called with the new value and the one before, when a setting changes. It must not block.

        Its errors are logged, and do not keep other callbacks from being called.
        """
        self._spec.setting(name)
        if not callable(callback) or inspect.iscoroutinefunction(callback):
            raise ConfigError(
                f"on_change({name!r}, {callback!r}): expected a plain function of the new value and the old"
            )
        self._callbacks.setdefault(name, []).append(callback)

    async def history(self, name: str) -> list[SettingChange]:
        """Every revision the bucket has of a setting, oldest first: who set it to what, and when."""
        self._spec.setting(name)
        return [self._change(name, entry) for entry in await self._kv.history(self._scope + name)]

    # ---- writing -----------------------------------------------------------------------------------------------

    async def set(self, name: str, value: object, *, by: str, revision: int | None = None) -> int:
        """Set a value; returns its revision. The whole value is replaced.

        Args:
            by: Who does it.
            revision: Write only if this is the setting's last revision; 0 for a setting that was never set.

        Raises:
            ConfigError: The value is not of the setting's type.
            Conflict: The setting has another revision.
        """
        return await self._put(name, {"value": self._spec.setting(name).check(value)}, by, revision)

    async def delete(self, name: str, *, by: str, revision: int | None = None) -> int:
        """Delete a setting; its ``on_delete`` decides the value from then on. Returns the revision."""
        self._spec.setting(name)
        return await self._put(name, {}, by, revision)

    async def _put(self, name: str, fields: Mapping[str, object], by: str, revision: int | None) -> int:
        if not isinstance(by, str) or not by:
            raise ConfigError(f"by={by!r}: expected who does it, as text, for the history")
        record = msgspec.json.encode({**fields, "by": by, "at": utc_now().isoformat()}, order="sorted")
        key = self._scope + name
        if revision is None:
            return await self._kv.put(key, record)
        if revision == 0:
            return await self._kv.create(key, record)
        return await self._kv.update(key, record, revision=revision)

    # ---- following ---------------------------------------------------------------------------------------------

    async def _follow(self, ready: asyncio.Future[None]) -> None:
        def tell(error: JetSparkError) -> None:
            _logger.warning("settings bucket %s: watch failed (%s); retrying", self._spec.bucket.bucket, error)

        await patiently(partial(self._watch, ready), patience_s=UNLIMITED_S, pause=PAUSE, on_wait=tell)

    async def _watch(self, ready: asyncio.Future[None]) -> None:
        """Take every change, until the connection is closed."""
        # The whole history: it is short, and the last value of a deleted setting is in it.
        watch = self._kv.watch(f"{self._scope}*", initial_marker=True, include_history=True)
        async with aclosing(cast("AsyncGenerator[KVEntry | None, None]", watch)) as entries:
            async for entry in entries:
                if entry is None:
                    self._fresh_at = clock.now()
                    if not ready.done():
                        ready.set_result(None)
                else:
                    self._take(entry)

    def _take(self, entry: KVEntry) -> None:
        name = entry.key.removeprefix(self._scope)
        setting = self._spec.settings.get(name)
        if setting is None or entry.revision <= self._revision:
            return  # of another version of the program; or known already
        self._revision = entry.revision
        self._stored.pop(name, None)
        if entry.operation == "put":
            self._stored[name] = entry.revision
        change = self._change(name, entry)
        if change.error:
            self.errors[name] = change.error
            _logger.error(
                "setting %s, revision %d: invalid value (%s); keeping the previous one",
                entry.key,
                entry.revision,
                change.error,
            )
        elif change.is_deleted:
            self._remove(name, setting)
        else:
            self._hold(name, change.value)

    def _remove(self, name: str, setting: Setting[Any]) -> None:
        self.errors.pop(name, None)
        if setting.on_delete != "keep":
            self._hold(name, setting.default)

    def _hold(self, name: str, new: object) -> None:
        self.errors.pop(name, None)
        old, self._values[name] = self._values[name], new
        if new != old:
            for callback in self._callbacks.get(name, ()):
                try:
                    callback(new, old)
                except Exception:
                    _logger.exception("setting %s: a callback failed; the change is in effect", self._scope + name)

    def _change(self, name: str, entry: KVEntry) -> SettingChange:
        value, by, error, is_deleted = None, "", "", entry.operation != "put"
        if not is_deleted:
            try:
                fields = msgspec.json.decode(entry.value, type=dict[str, msgspec.Raw])
                by = msgspec.json.decode(fields.get("by", b'""'), type=str)
                is_deleted = "value" not in fields
                value = None if is_deleted else self._spec.setting(name).read(bytes(fields["value"]))
            except msgspec.MsgspecError as wrong:
                error = str(wrong)
        return SettingChange(name, value, is_deleted, by, entry.created, entry.revision, error)

    async def _compare(self, every_s: float) -> None:
        """Ask the server, again and again, whether there is anything that the watch has not brought."""
        while True:
            asked_at, before = clock.now(), dict(self._stored)
            with suppress(JetSparkError):
                entries = await self._kv.snapshot([f"{self._scope}*"])
                for name, revision in before.items():
                    if self._scope + name not in entries:
                        await self._check_presence(name, revision)
                last = max((entry.revision for entry in entries.values() if self._is_declared(entry)), default=0)
                if last <= self._revision:
                    self._fresh_at = asked_at
            await asyncio.sleep(every_s)

    async def _check_presence(self, name: str, revision: int) -> None:
        """The setting is missing in the bucket: it was removed without a mark, as by a purge of the stream, which no
        watch reports."""
        try:
            await self._kv.get(self._scope + name, direct=False)  # what has answered may be a replica that is behind
        except KeyNotFound:
            if self._stored.get(name) == revision:
                _logger.warning("setting %s: purged together with its stream; treated as deleted", self._scope + name)
                del self._stored[name]
                self._remove(name, self._spec.setting(name))

    def _is_declared(self, entry: KVEntry) -> bool:
        return entry.key.removeprefix(self._scope) in self._spec.settings


def part_of(flag: str, unit: object) -> int:
    """Which of a hundred parts a unit belongs to."""
    return int.from_bytes(hashlib.sha256(f"{flag}/{unit}".encode()).digest()[:8]) % PARTS
