"""Stop strings on streamed text: find the first one that is completed, holding back no more than needed."""

from collections.abc import Sequence
from typing import NamedTuple


class Fed(NamedTuple):
    """What may be shown after a piece of text."""

    emit_text: str
    """Text that is certainly before any stop string."""
    matched: str | None
    """The stop string that was completed; from then on nothing is emitted."""


class StopStrings:
    """Looks for stop strings in text that comes in pieces; the result does not depend on where the pieces are cut.

    Of several stop strings the one that is completed first matches; of those completed by the same character, the
    longest.
    """

    def __init__(self, stop_strings: str | Sequence[str]) -> None:
        """
        Raises:
            ValueError: an empty stop string.
        """
        self._stops = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if not all(self._stops):
            raise ValueError(f"stop_strings={stop_strings!r} holds an empty string, which matches everywhere.")
        self._prefixes = {stop[:n] for stop in self._stops for n in range(1, len(stop))}
        self._longest = max(map(len, self._prefixes), default=0)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text_piece: str) -> Fed:
        """Takes the next piece of text."""
        if self.matched is not None:
            return Fed("", self.matched)
        text = self._held + text_piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return Fed(text[:start], self.matched)
        keep = self._undecided(text)
        self._held = text[len(text) - keep :]
        return Fed(text[: len(text) - keep], None)

    def finish(self) -> str:
        """The text that was held back, once no more can come."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(self._longest, len(text))
        return next((n for n in range(longest, 0, -1) if text[len(text) - n :] in self._prefixes), 0)
