"""The TLS context of both drivers, made from a :class:`TLSConfig`, and readable texts for the errors of ``ssl``.
The one module of the core that imports ``ssl``: a context reads certificate files but opens no connection."""

from __future__ import annotations

import re
import ssl

from jetspark.core.options import TLSConfig
from jetspark.errors import ConfigError

__all__ = ["OUR_CERTIFICATE", "describe_error", "is_name_mismatch", "is_plain_text", "tls_context"]

OUR_CERTIFICATE = "the server requires a certificate of ours: pass tls=TLSConfig(cert_file=..., key_file=...)"

# OpenSSL's numbers for a certificate with another name, and with another address.
_MISMATCHES = (62, 64)
# Alerts by which a server rejects our certificate; in TLS 1.2 "bad certificate" also stands for a missing one.
_CERTIFICATE_ALERT = re.compile(
    r"ALERT_((BAD|UNSUPPORTED)_CERTIFICATE|CERTIFICATE_(REVOKED|EXPIRED|UNKNOWN)|UNKNOWN_CA|ACCESS_DENIED)$"
)


def tls_context(tls: TLSConfig | None) -> ssl.SSLContext:
    """A client context that verifies the server; files are read at each call, so that rotation needs no restart."""
    if tls is not None and tls.context is not None:
        context: ssl.SSLContext = tls.context
        return context
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


def describe_error(error: Exception) -> str:
    """The error without OpenSSL's names and line numbers, with a remedy if one is known."""
    if isinstance(error, ConnectionRefusedError):
        return "connection refused"  # the drivers' own texts differ, and asyncio's does not name the cause
    if not isinstance(error, ssl.SSLError):
        return str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate was not accepted: {error.verify_message}"
    reason = error.reason or ""
    if reason.endswith("ALERT_CERTIFICATE_REQUIRED"):
        return OUR_CERTIFICATE
    if found := _CERTIFICATE_ALERT.search(reason):
        words = found[1].lower().replace("_", " ")
        return f"the server did not accept our certificate ({words}): check cert_file and key_file of TLSConfig"
    if is_plain_text(error):
        return "it answered in plain text, where TLS must begin"
    return f"TLS failed: {reason.lower().replace('_', ' ') or error}"


def is_name_mismatch(error: Exception) -> bool:
    """True if a certificate is valid, but for another name."""
    return isinstance(error, ssl.SSLCertVerificationError) and error.verify_code in _MISMATCHES


def is_plain_text(error: Exception) -> bool:
    """True if the peer answered in plain text where TLS was expected."""
    return isinstance(error, ssl.SSLError) and error.reason == "WRONG_VERSION_NUMBER"
