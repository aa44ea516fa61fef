"""The fenced blocks of the documentation, with where they stand and how they want to be run.

An HTML comment on the line before a block's fence, which readers don't see, says how: `<!-- runs -->`, or
`<!-- runs: gpu -->` for what only a GPU can do. A block without one is only compiled.
"""

import re
from pathlib import Path
from typing import Any, NamedTuple

from tests.paths import ROOT

PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCE = re.compile(r"^(`{3,}|~{3,})(\w*)\s*$")
_MARK = re.compile(r"^<!-- (runs(?:: gpu)?) -->$")


class Block(NamedTuple):
    """One fenced block."""

    page: Path
    line: int
    """Line of its first line of code, from 1."""
    language: str
    """Empty where the fence names none."""
    code: str
    mark: str
    """"runs", "runs: gpu", or empty."""

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    def run(self, names: dict[str, Any], change: dict[str, str] | None = None) -> None:
        """Executes the block in a namespace; `change` replaces texts first. Tracebacks name the page's lines."""
        code = self.code
        for old, new in (change or {}).items():
            code = code.replace(old, new)
        exec(compile("\n" * (self.line - 1) + code, str(self.page), "exec"), names)


def blocks(page: Path) -> list[Block]:
    """All fenced blocks of a page, in order."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    fence, start, language, mark = "", 0, "", ""
    for number, line in enumerate(lines, 1):
        match = _FENCE.match(line)
        if match and not fence:
            above = _MARK.match(lines[number - 2]) if number > 1 else None
            fence, start, language, mark = match[1], number + 1, match[2], above[1] if above else ""
        elif fence and line.strip() == fence:
            found.append(Block(page, start, language, "\n".join(lines[start - 1 : number - 1]) + "\n", mark))
            fence = ""
    assert not fence, f"{page}:{start}: the block does not end"
    return found


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    text = page.read_text(encoding="utf-8")
    for block in blocks(page):
        text = text.replace(block.code, "\n" * block.code.count("\n"), 1)
    return text
