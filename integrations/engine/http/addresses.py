"""Validation of a caller's arguments for a server: addresses and API keys.

Errors are `ConfigError`. The messages never contain the rejected address or key, because either may
be a secret.
"""

from __future__ import annotations

import ipaddress
import json
import re
from urllib.parse import SplitResult, urlsplit

from memsaver._runtime.redaction import register
from memsaver.errors import ConfigError

__all__ = ["Secret", "address_of", "host_of", "secret_of"]

_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9.])?")
_SHORTEST_REDACTED = 4  # characters; a shorter key may occur in ordinary words


class Secret:
    """An API key that never appears in a `repr` or in the message of a memsaver error.

    Args:
        text: the key, or "" for no key.
    """

    __slots__ = ("__weakref__", "_text")

    def __init__(self, text: str = "") -> None:
        self._text = text
        if text:
            register(self)

    def __bool__(self) -> bool:
        return bool(self._text)

    def __repr__(self) -> str:
        return "<secret>" if self else "<no secret>"

    def reveal(self) -> str:
        """Return the key."""
        return self._text

    def hidden_in(self, text: str) -> str:
        """Return `text` with the key, in any case and even if escaped, replaced by "<secret>"."""
        if len(self._text) >= _SHORTEST_REDACTED:
            for form in (self._text, json.dumps(self._text)[1:-1], repr(self._text)[1:-1]):
                text = re.sub(re.escape(form), "<secret>", text, flags=re.IGNORECASE)
        return text


def secret_of(api_key: object) -> Secret:
    """Return a valid API key as a `Secret`; an empty `Secret` for None.

    Raises:
        ConfigError: the key is not a string, is empty, or contains characters that are not allowed
            in an HTTP header.
    """
    if api_key is None:
        return Secret()
    if not isinstance(api_key, str):
        raise ConfigError(f"an API key must be a string or None, not {type(api_key).__name__}")
    if not api_key:
        raise ConfigError("the API key is empty: pass None if the server needs no key")
    if api_key != api_key.strip():
        raise ConfigError(
            "the API key begins or ends with white space, such as the line break at the end of a "
            "file: strip it"
        )
    if not all(" " <= character <= "~" for character in api_key):
        raise ConfigError(
            "the API key contains a line break or another character that is not printable ASCII, "
            "which an HTTP header cannot carry"
        )
    return Secret(api_key)


def address_of(url: object) -> str:
    """Check the address of a server, and return it without trailing slashes.

    Args:
        url: an address such as "http://host:30000", "https://host" or "http://host/below/a/proxy".

    Raises:
        ConfigError: the address is invalid, or contains a user name, a password, a query or a
            fragment.
    """
    if not isinstance(url, str):
        raise ConfigError(f"a server's address must be a string, not {type(url).__name__}")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(
            "a server's address must start with http:// or https://; this one does not"
        )
    if "@" in url:  # even in the path: a password may contain a slash
        raise ConfigError(
            "a server's address must not contain a user name or a password (an @): pass a key as "
            "api_key, which error messages never contain"
        )
    if not url.isprintable() or " " in url:
        raise ConfigError("a server's address must not contain spaces or unprintable characters")
    if "?" in url or "#" in url:
        raise ConfigError("a server's address must not contain a query (?) or a fragment (#)")
    parts, host, port = _split(url)
    if not host:
        raise ConfigError(
            "a server's address must be http://host:port, with a host name or an IP address and a "
            "port from 1 to 65535; this one is not"
        )
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}{port}{parts.path.rstrip('/')}"


def host_of(location: str) -> str:
    """Return the host and port of a redirect's target, for a message; omits invalid parts."""
    if not location.isprintable():
        return ""
    _, host, port = _split(location)
    return f"{host}{port}"


def _split(url: str) -> tuple[SplitResult, str, str]:
    """Return an address's parts, its host and its ":port"; an invalid host or port yields ""."""
    try:
        parts = urlsplit(url)
        host, number = parts.hostname or "", parts.port
    except ValueError:
        return SplitResult("", "", "", "", ""), "", ""
    if number == 0 or not _is_host(host):
        host = ""
    return parts, host, "" if number is None else f":{number}"


def _is_host(host: str) -> bool:
    try:
        if ":" in host:
            return "%" not in host and bool(ipaddress.IPv6Address(host))
        name = host.encode("idna").decode()
    except ValueError:  # includes UnicodeError
        return False
    return _HOST.fullmatch(name) is not None
