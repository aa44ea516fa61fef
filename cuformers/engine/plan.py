"""What one step computes. Plain Python, no torch."""

from dataclasses import dataclass, field
from typing import NamedTuple

from cuformers.engine.request import Request


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """A stretch of a request's context to compute."""

    request: Request
    start: int
    """Position of the first token."""
    count: int
    """Tokens, at least one."""
    reached: int
    """Length that its tokens count for; those beyond count for their own places, as when they were sampled."""
    final: bool
    """Whether the context ends with it, so that a token is sampled after it."""

    @property
    def row(self) -> int:
        """Row of the table that the request has now."""
        return self.request.row


class TableEntry(NamedTuple):
    """A page for a block of a running request."""

    group: int
    row: int
    index: int
    page: int


class Swap(NamedTuple):
    """A page of the device, and the place of its copy on the host."""

    page: int
    place: int


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """One step, and what the device's table of rows must learn before it, in the order of the fields."""

    saves: tuple[Swap, ...] = ()
    """Pages to copy to the host before anything else, as this very step may write them."""
    restores: tuple[Swap, ...] = ()
    """Pages to copy back from the host; not in a plan that saves some."""
    idle: tuple[int, ...] = ()
    """Rows that the device may believe busy, but whose requests have left."""
    admitted: tuple[Request, ...] = ()
    """Requests that have just been given a row: all of the row is to be written, with its block tables."""
    tables: tuple[TableEntry, ...] = ()
    """Pages that requests which ran before have been given."""
    chunks: tuple[Chunk, ...] = ()
    """Prompts to go on with."""
    decodes: tuple[Request, ...] = ()
    """Requests that compute one token and sample the next, by row: every one that the device believes busy, and maybe
    some that it has ended."""
    preempted: tuple[Request, ...] = ()
    """Requests that gave up their rows and wait again."""
    wait: bool = False
    """Nothing is planned, as pages lack: see the tokens in flight, then ask again."""


@dataclass(kw_only=True)
class Draft:
    """A plan in the making."""

    saves: list[Swap] = field(default_factory=list)
    restores: list[Swap] = field(default_factory=list)
    admitted: list[Request] = field(default_factory=list)
    tables: list[TableEntry] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    decodes: list[Request] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
