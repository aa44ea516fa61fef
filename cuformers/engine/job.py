"""What the planner knows of a request. Plain Python, no torch."""

from dataclasses import dataclass, field

from cuformers.engine.prefix import Cursor
from cuformers.engine.request import Request
from cuformers.engine.saved import Saved
from cuformers.engine.tables import BlockTables


@dataclass(eq=False, slots=True)
class Job:
    """A request from its arrival to its end."""

    request: Request
    arrival: int
    """How many came before it."""
    end: int = 0
    """Total length at which the device ends it, while it runs."""
    tables: BlockTables = field(default_factory=BlockTables)
    """Its pages; `request.tables` are the same lists."""
    saved: Saved | None = None
    """Copies of its pages on the host, while it waits."""
    cursor: Cursor | None = None
    """Its place in the prefix cache, while it runs and others may find its blocks."""

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: smaller ones."""
        return self.request.priority, self.arrival

    @property
    def in_prompt(self) -> bool:
        """Whether chunks of its context are still to be computed."""
        return self.request.computed < self.request.target
