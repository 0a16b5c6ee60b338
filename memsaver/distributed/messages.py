"""What the ranks say to each other at a meeting, in bytes of a fixed number."""

from __future__ import annotations

import hashlib
import socket
import struct
from dataclasses import dataclass

from memsaver.distributed.errors import RankFailure
from memsaver.errors import MemsaverError

__all__ = ["PROTOCOL", "Account", "Record"]

PROTOCOL = 1  # what ranks say to each other, and when

_RECORD = struct.Struct("<II16sdQQ16x")
# An account's fields in order, each cut to so many bytes, with NULs between them.
_LIMITS = {
    "host": 64,
    "kind": 64,
    "status": 32,
    "tag": 128,
    "what": 256,
    "stuck": 512,
    "message": 983,
}
_ACCOUNT_BYTES = 2048


@dataclass(frozen=True)
class Record:
    """How a rank fared in a step. Its bytes keep their number and layout in every protocol.

    Attributes:
        protocol: the rank's PROTOCOL.
        failed: 1 where the rank failed, else 0.
        digest: of the call and the step, the same where the ranks agree.
        seconds: spent on the rank's own part so far.
        device_bytes: device memory given back or taken.
        copied_bytes: bytes moved to backups or from them.
    """

    protocol: int
    failed: int
    digest: bytes
    seconds: float = 0.0
    device_bytes: int = 0
    copied_bytes: int = 0

    def packed(self) -> bytes:
        """For `parse` on all ranks."""
        fields = (self.protocol, self.failed, self.digest, self.seconds)
        return _RECORD.pack(*fields, self.device_bytes, self.copied_bytes)

    @staticmethod
    def parse(data: bytes) -> Record:
        """What a rank packed."""
        return Record(*_RECORD.unpack(data))

    @staticmethod
    def digest_of(what: str, step: str) -> bytes:
        """The digest of a call in words and the step that it is at."""
        text = f"{step}\0{what}".encode("utf-8", "replace")
        return hashlib.blake2b(text, digest_size=16).digest()


@dataclass(frozen=True)
class Account:
    """What happened on a rank, in words. Told when one failed.

    Attributes:
        host: the rank's machine.
        kind: its exception's class, or "" where it did not fail; likewise
        status: `MemsaverError.status`, and
        tag: `MemsaverError.tag`.
        what: the call that it made.
        stuck: what it could not undo, or "".
        message: its exception's text, or "".
    """

    host: str
    kind: str
    status: str
    tag: str
    what: str
    stuck: str
    message: str

    @classmethod
    def of(cls, error: BaseException | None, what: str, stuck: str = "") -> Account:
        """This rank's, of the call that it made and what that raised."""
        known = error if isinstance(error, MemsaverError) else None
        return cls(
            socket.gethostname(),
            type(error).__name__ if error is not None else "",
            known.status if known is not None else "",
            known.tag if known is not None else "",
            what,
            stuck,
            str(error) if error is not None else "",
        )

    def packed(self) -> bytes:
        """For `parse` on all ranks."""
        parts = []
        for name, limit in _LIMITS.items():
            text: str = getattr(self, name)
            parts.append(text.replace("\0", " ").encode("utf-8", "replace")[:limit])
        return b"\0".join(parts).ljust(_ACCOUNT_BYTES, b"\0")

    @staticmethod
    def parse(data: bytes) -> Account:
        """What a rank packed."""
        parts = data.split(b"\0")[: len(_LIMITS)]
        return Account(*(part.decode("utf-8", "ignore") for part in parts))

    def failure(self, rank: int) -> RankFailure:
        """What failed, as an error's attribute."""
        return RankFailure(rank, self.host, self.kind, self.status, self.tag, self.message)

    def not_undone(self, rank: int) -> RankFailure:
        """What could not be undone, likewise."""
        return RankFailure(rank, self.host, "", "", "", self.stuck)

    def call(self, rank: int) -> RankFailure:
        """The call that the rank made, likewise."""
        return RankFailure(rank, self.host, "", "", "", self.what)
