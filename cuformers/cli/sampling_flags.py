"""Flags of the command line for every option of GenerationConfig, made from its fields and their docstrings."""

import argparse
import ast
import inspect
import json
from collections.abc import Mapping
from dataclasses import fields
from textwrap import dedent
from typing import Any, get_args

from cuformers.generation.config import GenerationConfig

OF_THE_API = ("return_dict_in_generate", "output_scores", "output_logits", "output_logprobs")
"""Options about what `generate` returns to a program; a verb prints text or --json."""
NEED_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "seed",
    "num_return_sequences",
)  # fmt: skip
"""Options that only act when tokens are drawn: giving one of them switches that on."""


def add_generation_flags(parser: argparse.ArgumentParser, notes: Mapping[str, str]) -> None:
    """Adds --max-new-tokens, --temperature and all the others.

    Args:
        parser: gets them, in a group of their own.
        notes: for some options a sentence that follows the field's docstring.
    """
    group = parser.add_argument_group("generation", "Unset options are the checkpoint's, then the default.")
    about = field_docstrings(GenerationConfig)
    for field in fields(GenerationConfig):
        if field.name in OF_THE_API:
            continue
        text = f"{about[field.name]} {notes.get(field.name, '')}".strip().replace("%", "%%")
        kinds = [kind for kind in get_args(field.type) if kind is not type(None)]
        group.add_argument("--" + field.name.replace("_", "-"), default=None, help=text, **_reading(kinds))


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options that the command line sets; an option of sampling switches sampling on, unless told otherwise.

    Raises:
        ValueError: a value out of its range.
    """
    names = [f.name for f in fields(GenerationConfig) if f.name not in OF_THE_API]
    options = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if options.get("temperature") == 0:
        options.setdefault("do_sample", False)
    elif any(name in options and (name, options[name]) != ("num_return_sequences", 1) for name in NEED_SAMPLING):
        options.setdefault("do_sample", True)
    GenerationConfig().update(**options)
    return options


def field_docstrings(kind: type) -> dict[str, str]:
    """The string under each field of a class, in one line."""
    (body,) = ast.parse(dedent(inspect.getsource(kind))).body
    assert isinstance(body, ast.ClassDef)
    found = {}
    for statement, after in zip(body.body, body.body[1:]):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            assert isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant), ast.unparse(statement)
            found[statement.target.id] = " ".join(str(after.value.value).split())
    return found


def _reading(kinds: list[Any]) -> dict[str, Any]:
    """How argparse reads a value of these types."""
    if kinds == [bool]:
        return {"action": argparse.BooleanOptionalAction}
    if kinds in ([int], [float]):
        return {"type": kinds[0], "metavar": "N" if kinds == [int] else "X"}
    if str in kinds:
        return {"action": "append", "metavar": "TEXT"}  # once for each string
    return {"type": _json, "metavar": "JSON"}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON, such as 2 or [2, 3]") from None
