"""The progress bar of generate_batch: requests done, tokens a second, and how full the cache is."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Protocol

from cuformers.auto.batching.engine_like import EngineStats
from cuformers.base import env


class Bar(Protocol):
    """A progress bar in use."""

    def show(self, done: int, tokens: int, stats: EngineStats | None) -> None:
        """Shows so many finished requests and generated tokens, and the engine's figures."""
        ...


class _NoBar:
    def show(self, done: int, tokens: int, stats: EngineStats | None) -> None:
        pass


class _RichBar:
    def __init__(self, progress, task) -> None:
        self._progress, self._task, self._begin = progress, task, perf_counter()

    def show(self, done: int, tokens: int, stats: EngineStats | None) -> None:
        figures = f"{tokens / max(perf_counter() - self._begin, 1e-9):,.0f} tokens/s"
        if stats is not None and stats.num_blocks:
            figures += f", {1 - (stats.num_free + stats.num_cached) / stats.num_blocks:.0%} of the cache"
        self._progress.update(self._task, completed=done, figures=figures)


@contextmanager
def request_bar(requests: int, wanted: bool) -> Iterator[Bar]:
    """A bar on stderr, where it is wanted, stderr is a terminal, and CUFORMERS_NO_PROGRESS does not switch it off."""
    if not wanted or not sys.stderr.isatty() or env.flag("CUFORMERS_NO_PROGRESS"):
        yield _NoBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _RichBar(bar, bar.add_task("requests", total=requests, figures=""))
