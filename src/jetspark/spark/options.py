"""Parses the options of the formats: Spark passes strings under names in any case. Pure.

Each format has a frozen dataclass whose fields are its options: ``fetch_timeout_s`` is the option ``fetchTimeoutMs``
when its field says so, and otherwise the name in camel case. One place reads them all (:func:`read_options`): an
unknown name is an error that suggests the nearest known name, an invalid value is an error that shows it, and the
documentation is generated from the same fields (:func:`describe`).

Secrets can be options, but a file or an environment variable that the executor reads keeps them out of the query. A
secret is never in a ``repr`` or an error.
"""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from jetspark.core.auth import Auth, Credentials, NKey, Token, UserPassword
from jetspark.core.options import TLSConfig
from jetspark.core.subjects import is_subset, overlaps
from jetspark.errors import ConfigError

__all__ = [
    "LOSS_REMEDY",
    "Connecting",
    "Described",
    "boolean",
    "check_disjoint",
    "choice",
    "count",
    "describe",
    "milliseconds",
    "names",
    "option",
    "read_options",
    "size",
    "text",
]

T = TypeVar("T")

LOSS_REMEDY = "set failOnDataLoss=false to continue with the remaining messages"

# Largest whole number of seconds in 64 bits of nanoseconds.
MAX_MS = 9_223_372_036_000

_TRUE, _FALSE = ("true", "yes", "1"), ("false", "no", "0")


def text(value: str) -> str:
    if not value:
        raise ValueError("a text")
    return value


def names(value: str) -> tuple[str, ...]:
    """A comma-separated list."""
    found = tuple(part.strip() for part in value.split(",") if part.strip())
    if not found:
        raise ValueError("one or more names, with commas between them")
    return found


def count(value: str) -> int:
    number = _integer(value)
    if number < 1:
        raise ValueError("1 or more")
    return number


def size(value: str) -> int:
    """Bytes, optionally with a unit in Spark's spelling: ``512k``, ``64m``, ``1g``."""
    units = {"k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
    lowered = value.strip().lower().removesuffix("b")
    digits, unit = (lowered[:-1], units[lowered[-1]]) if lowered[-1:] in units else (lowered, 1)
    try:
        number = int(digits)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("a number of bytes such as 1048576, 512k or 64m")
    return number * unit


def milliseconds(value: str) -> float:
    """Milliseconds, converted to seconds."""
    number = _integer(value)
    if not 1 <= number <= MAX_MS:
        raise ValueError(f"1 millisecond or more, and at most {MAX_MS}")
    return number / 1000


def boolean(value: str) -> bool:
    lowered = value.strip().lower()
    if lowered not in _TRUE + _FALSE:
        raise ValueError("true or false")
    return lowered in _TRUE


def choice(*allowed: str) -> Callable[[str], str]:
    def read(value: str) -> str:
        found = value.strip().lower()
        if found not in allowed:
            raise ValueError(" or ".join([", ".join(allowed[:-1]), allowed[-1]] if len(allowed) > 1 else allowed))
        return found

    return read


def check_disjoint(name: str, filters: Iterable[str]) -> None:
    """Check that the filters of an option do not overlap.

    Raises:
        ConfigError: Two filters match the same message.
    """
    for one, other in itertools.combinations(filters, 2):
        if overlaps(one, other):
            wider = one if is_subset(other, one) else other
            raise ConfigError(
                f"{name}: {one!r} and {other!r} overlap, which the server refuses; {wider!r} alone may do"
            )


def _integer(value: str) -> int:
    try:
        return int(value.strip().replace("_", ""))
    except ValueError:
        raise ValueError("a whole number") from None


def option(
    read: Callable[[str], Any], doc: str, *, default: Any = None, name: str | None = None, secret: bool = False
) -> Any:
    """A dataclass field for an option; ``doc`` is its line in the documentation."""
    metadata = {"read": read, "doc": doc, "name": name, "secret": secret}
    return dataclasses.field(default=default, metadata=metadata, repr=not secret)


def read_options(kind: type[T], format_name: str, given: Mapping[str, str]) -> T:
    """The options of a format.

    Raises:
        ConfigError: An option is unknown, invalid, or contradicts another one.
    """
    known = {entry.name.lower(): entry for entry in describe(kind)}
    values: dict[str, Any] = {}
    for name, value in given.items():
        # Added by Spark itself, or options of the query and not of the format.
        if name.lower() in _SPARKS_OWN:
            continue
        entry = known.get(name.lower())
        if entry is None:
            raise ConfigError(f"{format_name}: unknown option {name!r}{_suggestion(name, known.values())}")
        try:
            values[entry.field] = entry.read(value)
        except ValueError as error:
            shown = "..." if entry.is_secret else repr(value)
            raise ConfigError(f"{format_name}: {entry.name}={shown}: expected {error}") from None
    return kind(**values)


_SPARKS_OWN = frozenset({"checkpointlocation", "path", "queryname", "header"})


# Names of the same options elsewhere, mainly in Kafka's source and sink.
_ELSEWHERE = {
    "kafka.bootstrap.servers": ("servers",),
    "bootstrap.servers": ("servers",),
    "url": ("servers",),
    "host": ("servers",),
    "subscribe": ("stream",),
    "subscribepattern": ("streamPattern",),
    "topic": ("subject", "stream"),
    "filter": ("subjects", "keys"),
    "username": ("user",),
    "creds": ("credentialsFile",),
    "name": ("stream", "bucket"),
    "table": ("bucket",),
}


def _suggestion(name: str, known: Iterable[Described]) -> str:
    by_lower = {entry.name.lower(): entry.name for entry in known}
    elsewhere = [each.lower() for each in _ELSEWHERE.get(name.lower(), ()) if each.lower() in by_lower]
    close = elsewhere or difflib.get_close_matches(name.lower(), by_lower)
    if close:
        return f"; did you mean {by_lower[close[0]]!r}?"
    return f"; expected one of {', '.join(sorted(by_lower.values()))}"


@dataclass(frozen=True, slots=True)
class Described:
    """One option of a format."""

    name: str
    field: str
    doc: str
    default: Any
    read: Callable[[str], Any]
    is_secret: bool


def describe(kind: Any) -> list[Described]:
    """Every option of a format, in the order of its fields."""
    return [
        Described(
            entry.metadata["name"] or _camel(entry.name),
            entry.name,
            entry.metadata["doc"],
            entry.default,
            entry.metadata["read"],
            entry.metadata["secret"],
        )
        for entry in dataclasses.fields(kind)
        if "read" in entry.metadata
    ]


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


@dataclass(frozen=True, slots=True, kw_only=True)
class Connecting:
    """Connection options, part of every format. Hashable: workers keep connections by them."""

    servers: tuple[str, ...] = option(names, "NATS URLs, with commas between them", default=("nats://127.0.0.1:4222",))
    user: str | None = option(text, "user name; needs one of the passwords")
    password: str | None = option(
        text, "password; `passwordEnv` or `passwordFile` keep it out of the query", secret=True
    )
    password_env: str | None = option(text, "environment variable of the executor that has the password")
    password_file: str | None = option(text, "file on the executor that has the password")
    token: str | None = option(text, "token; `tokenEnv` or `tokenFile` keep it out of the query", secret=True)
    token_env: str | None = option(text, "environment variable of the executor that has the token")
    token_file: str | None = option(text, "file on the executor that has the token")
    credentials_file: str | None = option(text, "credentials file (`.creds`) on the executor")
    nkey_seed_file: str | None = option(text, "file on the executor that has an nkey seed")
    tls_ca_file: str | None = option(text, "certificate authority of the server")
    tls_cert_file: str | None = option(text, "client certificate")
    tls_key_file: str | None = option(text, "key of the client certificate")
    domain: str | None = option(text, "JetStream domain")
    prefix: str | None = option(text, "where the JetStream API is imported to, if not `$JS.API`")
    request_timeout_s: float = option(
        milliseconds, "longest wait for an answer of JetStream", default=10.0, name="requestTimeoutMs"
    )

    def __post_init__(self) -> None:
        for url in self.servers:
            try:
                has_user = urlsplit(url if "//" in url else f"//{url}").username is not None
            except ValueError as error:
                # The error does not show the URL, which may contain a password.
                raise ConfigError(f"servers: a URL that cannot be read ({error}): expected nats://host:port") from None
            if has_user:
                # Spark shows options in plans and logs.
                raise ConfigError(
                    "servers: a URL with a user or password in it would be shown in the query plan; "
                    "use user and passwordEnv, tokenEnv or credentialsFile"
                )
        ways = ["user", "token", "token_env", "token_file", "credentials_file", "nkey_seed_file"]
        chosen = [name for name in ways if getattr(self, name) is not None]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(map(_camel, chosen))}: expected one way to authenticate")
        passwords = [name for name in ("password", "password_env", "password_file") if getattr(self, name) is not None]
        if len(passwords) > 1:
            raise ConfigError(f"{' and '.join(map(_camel, passwords))}: expected one of them")
        if bool(passwords) != (self.user is not None):
            raise ConfigError("user: expected together with password, passwordEnv or passwordFile")
        if (self.tls_cert_file is None) != (self.tls_key_file is None):
            raise ConfigError("tlsCertFile and tlsKeyFile: expected both, or neither")
        if self.domain is not None and self.prefix is not None:
            raise ConfigError(f"domain={self.domain!r} with prefix={self.prefix!r}: expected one of the two")

    def auth(self) -> Auth | None:
        """The credentials; files and environment variables are read now, on the executor."""
        if self.user is not None:
            return UserPassword(self.user, _secret("password", self.password, self.password_env, self.password_file))
        if self.token is not None or self.token_env is not None or self.token_file is not None:
            return Token(_secret("token", self.token, self.token_env, self.token_file))
        if self.credentials_file is not None:
            return Credentials(self.credentials_file)
        if self.nkey_seed_file is not None:
            return NKey(_read_file("nkeySeedFile", self.nkey_seed_file))
        return None

    def tls(self) -> TLSConfig | None:
        if self.tls_ca_file is None and self.tls_cert_file is None:
            return None
        return TLSConfig(ca_file=self.tls_ca_file, cert_file=self.tls_cert_file, key_file=self.tls_key_file)


def _secret(what: str, given: str | None, variable: str | None, file: str | None) -> str:
    if given is not None:
        return given
    if variable is not None:
        value = os.environ.get(variable)
        if not value:
            raise ConfigError(f"{what}Env={variable!r}: no such environment variable on this machine")
        return value
    assert file is not None
    return _read_file(f"{what}File", file)


def _read_file(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise ConfigError(f"{name}={path!r}: {error.strerror or error}") from None
