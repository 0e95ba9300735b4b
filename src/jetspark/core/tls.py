"""From a :class:`TLSConfig` to the context both drivers use. The one module of the core that knows ``ssl``:
a context reads certificate files but opens no connection."""

from __future__ import annotations

import ssl

from jetspark.core.options import TLSConfig
from jetspark.errors import ConfigError

__all__ = ["tls_context"]


def tls_context(tls: TLSConfig | None) -> ssl.SSLContext:
    """A client context that verifies the server; the files are read anew each time, so rotation needs no restart."""
    if tls is not None and tls.context is not None:
        if not isinstance(tls.context, ssl.SSLContext):
            raise ConfigError(f"context of type {type(tls.context).__name__}: expected ssl.SSLContext")
        return tls.context
    ca_file = str(tls.ca_file) if tls is not None and tls.ca_file is not None else None
    try:
        context = ssl.create_default_context(cafile=ca_file)
        if tls is not None and tls.cert_file is not None:
            # Without a password OpenSSL would ask for one on the terminal, and wait.
            context.load_cert_chain(tls.cert_file, tls.key_file, tls.key_password or (lambda: ""))
    except (OSError, ssl.SSLError) as error:
        named = [str(path) for path in (ca_file, tls and tls.cert_file, tls and tls.key_file) if path]
        raise ConfigError(f"TLS files {', '.join(named)}: {error}") from error
    return context
