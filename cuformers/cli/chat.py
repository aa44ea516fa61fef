"""`cuformers chat MODEL`: a talk with a model, in the terminal or line by line from stdin."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from cuformers.cli.answer import Asked, complain, completed, stream
from cuformers.cli.conversation import Conversation, Leave
from cuformers.cli.model_flags import add_model_flags, load_model, load_tokenizer
from cuformers.cli.parser import verb_parser
from cuformers.cli.sampling_flags import add_generation_flags, given_options

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel
    from cuformers.auto.tokenizers.tokenizer import Tokenizer

ABOUT = "Talks with a model that has a chat template: a folder or a hub id. Type /help there for the commands."
MOST_TOKENS = 2048
NOTES = {
    "max_new_tokens": f"Default here: up to {MOST_TOKENS}, as far as the model's positions go.",
    "do_sample": "Any option of drawing switches it on.",
    "seed": "Default here: a new one for each answer.",
}
PROMPT = "> "


def main(argv: Sequence[str]) -> int:
    """Talks until the user leaves.

    Args:
        argv: arguments after the verb.

    Returns:
        0; where lines come from a file or a pipe, 1 when one of them could not be answered.

    Raises:
        ValueError: arguments, a checkpoint or options that are not possible.
    """
    arguments = _parser().parse_args(argv)
    given = given_options(arguments)
    if given.get("num_return_sequences", 1) > 1:
        raise ValueError("a talk has one answer at a time: leave --num-return-sequences out.")
    tokenizer = load_tokenizer(arguments.model, arguments)
    tokenizer.get_chat_template()  # says what is missing before the model is loaded
    model = load_model(arguments.model, arguments)
    talk = Conversation(arguments.system)
    terminal = sys.stdin.isatty()
    if terminal:
        print(f"{arguments.model} on {model.device}. /help lists the commands.", file=sys.stderr)
    return _talk(model, tokenizer, talk, given, _typed() if terminal else iter(sys.stdin), arguments.stats)


def _parser() -> argparse.ArgumentParser:
    parser = verb_parser("chat", ABOUT)
    parser.add_argument("model", metavar="MODEL", help="a folder or a hub id")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--stats", action="store_true", help="speed and memory after each answer, to stderr")
    add_model_flags(parser)
    add_generation_flags(parser, NOTES)
    return parser


def _typed() -> Iterator[str]:
    """Lines from a terminal, until Ctrl-D; Ctrl-C drops the line."""
    with suppress(ImportError):  # not on every system
        import readline  # noqa: F401  # input() then edits the line, and knows the earlier ones
    while True:
        try:
            yield input(PROMPT)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print("\n/exit or Ctrl-D leaves.", file=sys.stderr)


def _talk(
    model: "PreTrainedModel",
    tokenizer: "Tokenizer",
    talk: Conversation,
    given: Mapping[str, Any],
    lines: Iterator[str],
    with_stats: bool,
) -> int:
    failed = 0
    for line in lines:
        try:
            if line.startswith("/"):
                print(talk.command(line), file=sys.stderr)
            elif line.strip():
                _answer(model, tokenizer, talk, given, line.strip(), with_stats)
        except Leave:
            break
        except ValueError as problem:  # the talk goes on without this line
            complain(str(problem))
            failed = int(not sys.stdin.isatty())
    return failed


def _answer(
    model: "PreTrainedModel",
    tokenizer: "Tokenizer",
    talk: Conversation,
    given: Mapping[str, Any],
    text: str,
    with_stats: bool,
) -> None:
    """One message and its answer; the talk stays as it was where that is not possible."""
    before = len(talk.messages)
    talk.say("user", text)
    try:
        encoded = tokenizer.apply_chat_template(talk.whole(), add_generation_prompt=True, return_tensors="pt")
        ids = encoded["input_ids"]
        asked = Asked(
            ids=ids, options=completed(model, given, ids.shape[1], MOST_TOKENS, "forget the talk with /reset")
        )
        answer, times = stream(model, tokenizer, asked)
    except BaseException:
        del talk.messages[before:]
        raise
    print(" [stopped]" if answer.finish == "interrupt" else "", flush=True)
    talk.say("assistant", answer.text)
    if with_stats and len(times) > 1:
        from cuformers.cli.stats import measure

        print("\n".join(measure(model, ids.shape[1], times).lines()), file=sys.stderr)
