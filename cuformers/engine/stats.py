"""The counters of an engine. Plain Python, no torch."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Stats:
    """How full the engine is, and what has happened so far."""

    num_blocks: int
    """Pages of the cache."""
    num_free: int
    """Pages that hold nothing of use."""
    num_cached: int
    """Pages that no running request holds, but that the next prompt may find."""
    num_waiting: int
    """Requests without a row."""
    num_running: int
    """Requests with a row."""
    hit_tokens: int
    """Tokens that were not computed, as the cache had their keys."""
    preemptions: int
    """How often a request gave up its pages to another one."""
