"""The command `cuformers <verb>`: chooses the GPUs, then imports the verb's module and calls its `main(argv)`."""

import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module
from typing import NamedTuple

from cuformers.base.version import VERSION

VERBS = {
    "env": "what this machine, its driver and its GPUs can do, and why not more",
    "generate": "continue a prompt with a model",
    "chat": "talk with a model",
    "bench": "measure a model beside what this machine allows",
}
USAGE_ERROR = 2
CLOSED_PIPE = 141  # 128 + SIGPIPE, as shells do
INTERRUPTED = 130  # 128 + SIGINT, as shells do


class Arguments(NamedTuple):
    """The command line, less what is handled here."""

    verb: str | None
    rest: list[str]
    gpus: str | None
    traceback: bool


def run() -> None:
    """Entry point of the installed command."""
    try:
        code = main(sys.argv[1:])
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = CLOSED_PIPE
    sys.exit(code)


def main(argv: Sequence[str]) -> int:
    """Runs a command line, without the program's name, and returns its exit code."""
    try:
        arguments = split(argv)
        if arguments.verb in (None, "-h", "--help"):
            print(_help())
            return 0
        if arguments.verb in ("-V", "--version"):
            print(f"cuformers {VERSION}")
            return 0
        _check_verb(arguments.verb)
        return _call(arguments)
    except (ValueError, ImportError) as problem:  # the user's mistake, or a package that is missing or broken
        if "--traceback" in argv:
            raise
        return _complain(str(problem))
    except KeyboardInterrupt:
        return INTERRUPTED


def split(argv: Sequence[str]) -> Arguments:
    """Takes `--gpus LIST` (or `--gpus=LIST`) and `--traceback` out of the arguments, up to a "--".

    Raises:
        ValueError: `--gpus` stands without its list.
    """
    rest: list[str] = []
    gpus, traceback = None, False
    words = iter(argv)
    for word in words:
        if word == "--":
            rest += [word, *words]
        elif word == "--traceback":
            traceback = True
        elif word == "--gpus":
            gpus = next(words, None)
            if gpus is None:
                raise ValueError('--gpus needs a list: for example --gpus 2,0, or --gpus "" for the CPU.')
        elif word.startswith("--gpus="):
            gpus = word.removeprefix("--gpus=")
        else:
            rest.append(word)
    return Arguments(rest[0] if rest else None, rest[1:], gpus, traceback)


def _call(arguments: Arguments) -> int:
    from cuformers.cuda.visible import prefer_pci_order, select_gpus

    if arguments.gpus is not None:
        select_gpus(arguments.gpus)
    else:
        prefer_pci_order()
    return import_module(f"cuformers.cli.{arguments.verb}").main(arguments.rest)


def _check_verb(verb: str | None) -> None:
    if verb in VERBS:
        return
    near = [known for known in VERBS if known.startswith(verb or "")] or get_close_matches(verb or "", VERBS, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"there is no verb {verb!r}: known are {', '.join(VERBS)}.{hint}")


def _help() -> str:
    width = max(map(len, VERBS))
    rows = "\n".join(f"  {verb:{width}}  {what}" for verb, what in VERBS.items())
    return (
        f"usage: cuformers VERB [options]\n\nRuns and trains transformer models on NVIDIA GPUs.\n\nverbs:\n{rows}\n\n"
        'options of every verb:\n  --gpus LIST  GPUs to use, numbered as in nvidia-smi: "2,0"; "" for none\n'
        "  --traceback  show where in the program an error was found\n"
        "  --help       what the verb takes\n\n"
        "cuformers --version prints the version."
    )


def _complain(text: str) -> int:
    print(f"cuformers: {text}", file=sys.stderr)
    return USAGE_ERROR
