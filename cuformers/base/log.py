"""What cuformers tells the user: short notices on stderr, progress bars for long work."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from cuformers.base import env

_said: set[str] = set()


def notice(text: str, once: bool = False) -> None:
    """Writes one line to stderr, unless CUFORMERS_QUIET is set; `once` says the same text a single time."""
    if env.flag("CUFORMERS_QUIET") or (once and text in _said):
        return
    _said.add(text)
    print(f"cuformers: {text}", file=sys.stderr, flush=True)


class Bar(Protocol):
    """A progress bar in use."""

    def advance(self, amount: float) -> None: ...


class _NoBar:
    def advance(self, amount: float) -> None:
        pass


class _RichBar:
    def __init__(self, progress, task) -> None:
        self._progress, self._task = progress, task

    def advance(self, amount: float) -> None:
        self._progress.advance(self._task, amount)


@contextmanager
def progress(title: str, total: float, *, in_bytes: bool = False, show: bool | None = None) -> Iterator[Bar]:
    """A progress bar on stderr; by default only where stderr is a terminal and nothing switched it off."""
    if show is None:
        show = sys.stderr.isatty() and not env.flag("CUFORMERS_NO_PROGRESS")
    if not show:
        yield _NoBar()
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    count = DownloadColumn() if in_bytes else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), count, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        yield _RichBar(bar, bar.add_task(title, total=total))
