"""The messages that the ranks of a group exchange about an attempt."""

from __future__ import annotations

import hashlib
import json
import socket
import struct
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from memsaver.distributed.errors import RankFailure
from memsaver.errors import MemsaverError

__all__ = ["JSON", "NOTHING", "PROTOCOL", "Codec", "FailureRecord", "Header", "text_of"]

PROTOCOL = 2  # the version of an attempt's messages and their order

_MESSAGE_CHARACTERS = 8192  # large, because an engine's error may contain a log
_FIELD_CHARACTERS = 256  # the limit on every other field
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Codec:
    """An encoder and decoder for an attempt's values and exceptions, for exchange between ranks.

    Attributes:
        pack: a function that encodes a value as bytes. The value None is always sent as b"".
        unpack: a function that decodes these bytes on every rank.
        confirmed: whether the ranks inform one another whether `unpack` succeeded.
        pack_error: a function that encodes an exception for `unpack_error`, or returns b"" if the
            exception cannot be sent.
        unpack_error: a function that decodes these bytes to `Outcome.error`.
    """

    pack: Callable[[Any], bytes]
    unpack: Callable[[bytes], Any]
    confirmed: bool = False
    pack_error: Callable[[BaseException], bytes] = lambda _: b""
    unpack_error: Callable[[bytes], Any] = lambda _: None


NOTHING = Codec(lambda _: b"", lambda _: None)  # values stay on their rank
JSON = Codec(lambda value: json.dumps(value).encode(), json.loads)


@dataclass(frozen=True)
class Header:
    """The summary of an attempt on one rank, with the same size and layout in every protocol.

    Attributes:
        protocol: the rank's PROTOCOL.
        failed: 1 if the attempt failed on this rank, otherwise 0.
        digest: the digest of the call and the step, the same on all ranks that make the same call.
        body_bytes: the size of the packed value.
        inline: the packed value if it has at most `INLINE_BYTES` bytes, otherwise b"".
    """

    protocol: int
    failed: int
    digest: bytes
    body_bytes: int = 0
    inline: bytes = b""

    INLINE_BYTES = 32
    LAYOUT = struct.Struct("<II16sQ32s")

    @classmethod
    def of(cls, what: str, step: str, body: bytes, has_failed: bool) -> Header:
        """Return the header of this rank's attempt."""
        text = f"{step}\0{what}".encode("utf-8", "replace")
        digest = hashlib.blake2b(text, digest_size=16).digest()
        inline = body if len(body) <= cls.INLINE_BYTES else b""
        return cls(PROTOCOL, int(has_failed), digest, len(body), inline)

    def packed(self) -> bytes:
        """Encode this object as the bytes that `parse` decodes."""
        return self.LAYOUT.pack(
            self.protocol, self.failed, self.digest, self.body_bytes, self.inline
        )

    @classmethod
    def parse(cls, data: bytes) -> Header:
        """Decode a header from the bytes that a rank sent."""
        protocol, failed, digest, body_bytes, inline = cls.LAYOUT.unpack(data)
        return cls(protocol, failed, digest, body_bytes, inline[:body_bytes])

    @property
    def call(self) -> tuple[int, bytes]:
        """The fields of the header that must be equal on all ranks."""
        return self.protocol, self.digest


@dataclass(frozen=True)
class FailureRecord:
    """The failure record of one rank, which is sent if an attempt failed or the calls differ.

    Attributes:
        what: the call that the rank made.
        host: the name of the rank's machine.
        kind: the class of the rank's exception, or "" if the rank did not fail.
        status: the error's `MemsaverError.status`, or "".
        tag: the error's `MemsaverError.tag`, or "".
        message: the exception's text, or "".
    """

    what: str
    host: str = ""
    kind: str = ""
    status: str = ""
    tag: str = ""
    message: str = ""

    @classmethod
    def of(cls, error: BaseException | None, what: str) -> FailureRecord:
        """Return this rank's record of a call and its exception, if any."""
        host = socket.gethostname()
        if error is None:
            return cls(_cut(what), host)
        known = error if isinstance(error, MemsaverError) else None
        return cls(
            _cut(what),
            host,
            _cut(type(error).__name__),
            _cut(known.status) if known is not None else "",
            _cut(known.tag) if known is not None else "",
            text_of(error)[:_MESSAGE_CHARACTERS],
        )

    def packed(self, error: bytes = b"") -> bytes:
        """Encode this object as the bytes that `parse` decodes, followed by the exception that a
        codec packed.
        """
        text = json.dumps(asdict(self)).encode()
        return _LENGTH.pack(len(text)) + text + error

    @classmethod
    def parse(cls, data: bytes) -> tuple[FailureRecord, bytes]:
        """Decode a rank's record and the exception that the rank's codec packed."""
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        return cls(**json.loads(data[_LENGTH.size : end])), data[end:]

    def failure(self, rank: int) -> RankFailure:
        """Return the rank's failure, as an element of an error's `failures`."""
        return RankFailure(rank, self.host, self.kind, self.status, self.tag, self.message)

    def call(self, rank: int) -> RankFailure:
        """Return the rank's call, for the error that reports differing calls."""
        return RankFailure(rank, self.host, "", "", "", self.what)


def text_of(error: BaseException) -> str:
    """Return an exception's text, or its class if the text is empty or `str` fails."""
    try:
        return str(error) or type(error).__name__
    except BaseException as worse:
        return f"{type(error).__name__} (its text raises {type(worse).__name__})"


def _cut(text: object) -> str:
    return str(text)[:_FIELD_CHARACTERS]
