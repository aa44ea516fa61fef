"""Stop strings in streamed text, against a search that looks at one character after the other."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuformers.generation import StopStrings


def naive(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Shown text and match: the first character that completes a stop string; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [s for s in stops if text[:end].endswith(s)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


TEXT = st.text(alphabet="abc\n", max_size=30)
STOPS = st.lists(st.text(alphabet="abc\n", min_size=1, max_size=5), min_size=1, max_size=4)


@given(st.lists(TEXT, max_size=10), STOPS)
@settings(max_examples=1000, deadline=None)
def test_equals_a_naive_search_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    shown, matched = naive(whole, stops)
    stream, emitted = StopStrings(stops), ""
    for i, piece in enumerate(pieces):
        fed = stream.feed(piece)
        emitted += fed.emit_text
        so_far = "".join(pieces[: i + 1])
        assert shown.startswith(emitted), "text of a stop string was shown"
        assert fed.matched == naive(so_far, stops)[1], "matched too late or too early"
        if fed.matched is None:
            held = so_far[len(emitted) :]
            longest_open = max(
                (n for n in range(len(so_far) + 1) for s in stops if n < len(s) and so_far.endswith(s[:n])), default=0
            )
            assert len(held) == longest_open, "held back more than a stop string's beginning"
    assert stream.matched == matched
    emitted += stream.finish()
    assert emitted == shown


def test_after_a_match_nothing_is_shown() -> None:
    stream = StopStrings("stop")
    assert stream.feed("do st") == ("do ", None)
    assert stream.feed("opera") == ("", "stop")
    assert stream.feed("more") == ("", "stop")
    assert stream.finish() == ""


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopStrings(["a", ""])
