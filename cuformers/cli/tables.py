"""Nested plain data as tables for the eye: every key and every value, one table for each section."""

from collections.abc import Mapping

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cuformers.cuda.memory import human

PIPE_WIDTH = 160  # columns, where nobody's terminal sets the width


def make_console(width: int | None = None) -> Console:
    """A console on stdout, wide enough for the tables where stdout is not a terminal."""
    console = Console(width=width, highlight=False)
    return console if width or console.is_terminal else Console(width=PIPE_WIDTH, highlight=False)


def show(data: Mapping[str, dict | list[dict]], console: Console) -> None:
    """Prints a table for each section: a dict as rows of name and value, a list as one row for each element."""
    for title, section in data.items():
        if isinstance(section, dict):
            console.print(_pairs(title, section))
        elif section:
            console.print(_rows(title, section))


def cell(key: str, value: object) -> Text:
    """One value: sizes with unit, four digits of fractions, yes and no for booleans, a dash for what is not there."""
    if value is None or value == "":
        return Text("-", style="dim")
    if isinstance(value, bool):
        return Text("yes" if value else "no", style="green" if value else "red")
    if isinstance(value, float):
        return Text(f"{value:.4g}")
    if key.endswith("_bytes") and isinstance(value, int):
        return Text(human(value))
    return Text(str(value), overflow="fold")


def label(key: str) -> str:
    """A key as a heading; names of environment variables stay as they are."""
    return key if key.isupper() else key.removesuffix("_bytes").replace("_", " ")


def _pairs(title: str, section: dict) -> Table:
    table = Table(title=label(title), title_justify="left", show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in section.items():
        table.add_row(label(key), cell(key, value))
    return table


def _rows(title: str, rows: list[dict]) -> Table:
    table = Table(title=label(title), title_justify="left")
    for key in rows[0]:
        table.add_column(label(key), overflow="fold")
    for row in rows:
        table.add_row(*(cell(key, value) for key, value in row.items()))
    return table
