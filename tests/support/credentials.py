"""An operator, an account and users, made on the spot: what `nsc` would make, from fixed keys."""

from __future__ import annotations

import base64
import json
from typing import Any

from jetspark.core.auth import Role, create_seed, public_key, sign
from jetspark.server import ServerConfig

USER = create_seed("user", b"u" * 32)
STRANGER = create_seed("user", b"x" * 32)
ACCOUNT = create_seed("account", b"a" * 32)
OPERATOR = create_seed("operator", b"o" * 32)


def jwt(issuer: str, subject: str, name: str, role: Role, **claims: Any) -> str:
    def part(value: dict[str, Any]) -> str:
        return base64.urlsafe_b64encode(json.dumps(value).encode()).rstrip(b"=").decode()

    body = {
        "jti": name,
        "iat": 1_700_000_000,
        "iss": public_key(issuer),
        "name": name,
        "sub": public_key(subject),
        "nats": {"type": role, "version": 2, **claims},
    }
    signed = f"{part({'typ': 'JWT', 'alg': 'ed25519-nkey'})}.{part(body)}"
    return f"{signed}.{base64.urlsafe_b64encode(sign(issuer, signed.encode())).rstrip(b'=').decode()}"


def credentials_text(seed: str, jwt_subject: str = USER) -> str:
    """A credentials file; it is good when the seed belongs to the JWT's subject."""
    unlimited = {"subs": -1, "data": -1, "payload": -1, "pub": {}, "sub": {}}
    token = jwt(ACCOUNT, jwt_subject, "app", "user", **unlimited)
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def operator_config() -> ServerConfig:
    """A server that trusts our operator and knows our account."""
    limits = dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), -1)
    account = jwt(OPERATOR, ACCOUNT, "team", "account", limits=limits | {"wildcards": True})
    return ServerConfig(
        jetstream=False,  # needs a system account, which authentication does not
        operator_jwt=jwt(OPERATOR, OPERATOR, "us", "operator"),
        resolver_preload={public_key(ACCOUNT): account},
    )
