"""`cuformers generate [MODEL] PROMPT`: continues a text, and shows it as it comes."""

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cuformers.cli.answer import Answer, Asked, complain, completed, several, show, stream
from cuformers.cli.model_flags import add_model_flags, load_model, load_tokenizer
from cuformers.cli.parser import verb_parser
from cuformers.cli.sampling_flags import add_generation_flags, given_options

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel
    from cuformers.auto.tokenizers.tokenizer import Tokenizer
    from cuformers.cli.stats import Stats

ABOUT = "Continues a text with a model: a folder, a hub id, or none for the built-in one, which tells small stories."
MOST_TOKENS = 200
NOTES = {
    "max_new_tokens": f"Default here: {MOST_TOKENS}.",
    "do_sample": "Any option of drawing switches it on.",
    "seed": "Default here: a new one each time.",
    "num_return_sequences": "More than one are shown in turn, when they are complete.",
}
INTERRUPTED = 130


def main(argv: Sequence[str]) -> int:
    """Generates.

    Args:
        argv: arguments after the verb.

    Returns:
        0; 130 where the user interrupted.

    Raises:
        ValueError: arguments, a checkpoint or options that are not possible.
    """
    arguments = _parser().parse_intermixed_args(argv)
    name, prompt = _words(arguments.words)
    given = given_options(arguments)
    if arguments.stats and given.get("num_return_sequences", 1) > 1:
        raise ValueError("--stats measures one answer: leave --num-return-sequences out.")
    if arguments.system is not None and not arguments.chat:
        raise ValueError("--system is part of a chat: give --chat too.")
    if name is None:
        from cuformers.auto.builtin import builtin_folder

        name = builtin_folder()
    tokenizer = load_tokenizer(name, arguments)
    ids = _encode(tokenizer, prompt, arguments)
    model = load_model(name, arguments)
    options = completed(model, given, 1 if ids is None else ids.shape[1], MOST_TOKENS)
    asked = Asked(ids=ids, options=options)
    if (options.get("num_return_sequences") or model.generation_config.num_return_sequences or 1) > 1:
        return _answer_in_turn(model, tokenizer, asked, prompt, arguments)
    return _answer(model, tokenizer, asked, prompt, arguments)


def _parser() -> argparse.ArgumentParser:
    parser = verb_parser("generate", ABOUT)
    parser.usage = "cuformers generate [MODEL] PROMPT [options]"
    parser.add_argument(
        "words", nargs="+", metavar="[MODEL] PROMPT", help='the text to continue; "-" reads it from stdin'
    )
    parser.add_argument(
        "--chat", action="store_true", help="ask with the model's chat template; only the answer is shown"
    )
    parser.add_argument("--system", metavar="TEXT", help="system prompt, for --chat")
    parser.add_argument("--json", action="store_true", help="one JSON object for each answer, when it is complete")
    parser.add_argument("--stats", action="store_true", help="speed and memory to stderr, measured after a warm-up")
    add_model_flags(parser)
    add_generation_flags(parser, NOTES)
    return parser


def _words(words: list[str]) -> tuple[str | None, str]:
    """The model, None for the built-in one, and the prompt."""
    if len(words) > 2:
        raise ValueError(f"[MODEL] PROMPT are at most two words, but there are {len(words)}: put the prompt in quotes.")
    *model, prompt = words
    if not model and os.path.isfile(os.path.join(prompt, "config.json")):  # a Path raises for a long text
        raise ValueError(f"{prompt!r} is a model's folder, and there is no prompt: add one after it.")
    if prompt == "-":
        prompt = sys.stdin.read().removesuffix("\n")
    return (model[0] if model else None), prompt


def _encode(tokenizer: "Tokenizer", prompt: str, arguments: argparse.Namespace) -> Any:
    """The prompt's tokens [1, L]; None where there are none."""
    if arguments.chat:
        system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
        messages = [*system, {"role": "user", "content": prompt}]
        encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    else:
        encoded = tokenizer(prompt, return_tensors="pt")
    return encoded["input_ids"] if encoded["input_ids"].shape[1] else None


def _answer(
    model: "PreTrainedModel", tokenizer: "Tokenizer", asked: Asked, prompt: str, arguments: argparse.Namespace
) -> int:
    from cuformers.cli.stats import measure, warm_up

    before = warm_up(model, tokenizer, asked) if arguments.stats else None
    write = _nowhere if arguments.json else show
    answer, times = stream(model, tokenizer, asked, write, with_prompt=not arguments.chat)
    stats = measure(model, asked.prompt_tokens, times, before) if len(times) > 1 else None
    if arguments.json:
        print(_as_json(prompt, answer, asked.options, stats))
    else:
        print()
    if arguments.stats and stats is not None:
        print("\n".join(stats.lines()), file=sys.stderr)
    return INTERRUPTED if answer.finish == "interrupt" else 0


def _answer_in_turn(
    model: "PreTrainedModel", tokenizer: "Tokenizer", asked: Asked, prompt: str, arguments: argparse.Namespace
) -> int:
    if arguments.stats:
        complain("--stats measures one answer: set --num-return-sequences 1.")
    answers = several(model, tokenizer, asked)
    if arguments.json:
        print("\n".join(_as_json(prompt, answer, asked.options, None) for answer in answers))
    else:
        start = "" if arguments.chat else prompt
        print("\n\n".join(start + answer.text for answer in answers))
    return 0


def _as_json(prompt: str, answer: Answer, options: Mapping[str, Any], stats: "Stats | None") -> str:
    """One line."""
    return json.dumps(
        {
            "prompt": prompt,
            "text": answer.text,
            "tokens": answer.tokens,
            "finish_reason": answer.finish,
            "options": dict(options),
            "stats": None if stats is None else stats.to_dict(),
        },
        ensure_ascii=False,
    )


def _nowhere(text: str) -> None:
    """Where text goes that is printed when it is complete."""
