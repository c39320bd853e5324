"""Places and blocks: how processes of one host name the memory of a segment to each other."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ARENA_HEADER", "SEGMENT_HEADER", "BlockName", "Place"]

ARENA_HEADER = "Residual-Arena"
"""The request header in which a client names the arena that it has mapped."""

SEGMENT_HEADER = "Residual-Segment"
"""The header of an answer that says at which place the leaf area is."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """A segment in the shared arena of a server.

    ``arena`` is the name of the arena's directory, ``offset`` the first byte of the segment in its file, and ``nbytes`` the
    segment's length.
    ``ticket`` is valid until the segment is used for something else.

    >>> place = Place(arena="residual-store-0123456789abcdef", offset=4096, nbytes=100, ticket="00" * 16)
    >>> Place.of_text(place.to_text()) == place
    True
    """

    arena: str
    offset: int
    nbytes: int
    ticket: str

    def to_text(self) -> str:
        """The place as the value of a header field."""
        return f"{self.arena} {self.offset} {self.nbytes} {self.ticket}"

    @classmethod
    def of_text(cls, text: str) -> Place:
        """The place that `to_text` wrote; raises ValueError for anything else."""
        arena, offset, nbytes, ticket = text.split(" ")
        return cls(arena=arena, offset=int(offset), nbytes=int(nbytes), ticket=ticket)


@dataclass(frozen=True)
class BlockName:
    """A block of a server's arena, whose segment a put names.

    ``claim`` is what the client wrote into the block when it took it: another client may have it by the time the put arrives.

    >>> BlockName.of_text("residual-store-0123456789abcdef:65536:" + "1f" * 16).start
    65536
    """

    arena: str
    start: int
    claim: str

    def to_text(self) -> str:
        """The block as a query parameter."""
        return f"{self.arena}:{self.start}:{self.claim}"

    @classmethod
    def of_text(cls, text: str) -> BlockName:
        """The block that `to_text` wrote; raises ValueError for anything else."""
        arena, start, claim = text.split(":")
        return cls(arena, int(start), claim)
