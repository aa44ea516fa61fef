"""Chat templates: Jinja source and messages in, text out, with the spans that the assistant wrote.

The environment is sandboxed and immutable, and offers what Transformers offers: raise_exception, strftime_now, tojson
without HTML escapes, loop controls, {% generation %} blocks. Source: https://huggingface.co/docs/transformers/chat_templating
"""

import json
import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any

from tokenizers import Encoding

from cuformers.auto.tokenizers.tool_schema import tool_schema
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice

Span = tuple[int, int]

# Marks that a {% generation %} block puts around its text while spans are wanted; no message can hold them.
_NONCE = secrets.token_hex(16)
_OPEN, _CLOSE = f"\ufdd0{_NONCE}(", f"\ufdd0{_NONCE})"
_marking: ContextVar[bool] = ContextVar("_marking", default=False)
_CONTINUE = "CONTINUE-HERE-MARK "  # ends in a space: its loss shows that the template trims messages


class ChatTemplateError(ValueError):
    """A chat template that is malformed, or that refuses this conversation."""


@dataclass(frozen=True, kw_only=True)
class Rendered:
    """Rendered conversations."""

    texts: list[str]
    """One text a conversation."""
    spans: list[list[Span]]
    """For each text the [start, end) characters inside {% generation %} blocks; empty lists unless asked for."""


def as_batch(conversation: Sequence[Any]) -> tuple[list[Any], bool]:
    """The conversations, and whether the caller gave several."""
    if isinstance(conversation, (str, Mapping)) or not isinstance(conversation, Sequence):
        raise bad_argument("conversation", conversation, "a list of messages such as {'role': 'user', 'content': 'Hi'}")
    if not conversation:
        raise ValueError("conversation is empty: a chat template needs at least one message.")
    first = conversation[0]
    if isinstance(first, (list, tuple)) or hasattr(first, "messages"):
        return [getattr(chat, "messages", chat) for chat in conversation], True
    return [conversation], False


def choose(held: str | Mapping[str, str] | None, asked: str | None, *, has_tools: bool = False) -> str:
    """The template's source: the one asked for by name or source, else the tokenizer's own."""
    if asked is not None:
        return held.get(asked, asked) if isinstance(held, Mapping) else asked
    if isinstance(held, Mapping):
        name = "tool_use" if has_tools and "tool_use" in held else "default"
        if name in held:
            return held[name]
        raise bad_argument("chat_template", None, f"one of {sorted(held)}", "None of them is the default.")
    if held is None:
        raise ValueError(
            "This tokenizer has no chat template: its model was not made for chats, or the template's file is "
            "missing. Pass chat_template= (Jinja source), or set tokenizer.chat_template."
        )
    return held


def render(
    source: str,
    conversations: Sequence[Any],
    *,
    tools: Sequence[Any] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = False,
    continue_final_message: bool | str = False,
    with_spans: bool = False,
    variables: Mapping[str, Any] | None = None,
    asked: Mapping[str, Any] | None = None,
) -> Rendered:
    """Renders each conversation. `asked`: the variables that the caller chose, for a notice where they have no effect.

    Raises ChatTemplateError where the template is malformed or refuses.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError(
            "add_generation_prompt=True opens a new message and continue_final_message goes on with the last one: "
            "pass one of them."
        )
    if continue_final_message and with_spans:
        raise ValueError("continue_final_message and return_assistant_tokens_mask=True exclude each other.")
    _check_documents(documents)
    _note_unused(source, tools, documents, asked or {}, with_spans)
    given = {
        **(variables or {}),
        "tools": None if tools is None else [tool_schema(tool) for tool in tools],
        "documents": documents,
        "add_generation_prompt": add_generation_prompt,
    }
    field = "content" if continue_final_message is True else continue_final_message
    texts, spans = [], []
    for chat in conversations:
        text = _run(source, _opened(chat, field, source) if field else chat, given, with_spans)
        found: list[Span] = []
        if with_spans:
            text, found = _take_marks(text)
        texts.append(_cut(text, chat, field) if field else text)
        spans.append(found)
    return Rendered(texts=texts, spans=spans)


def assistant_mask(encoding: Encoding, spans: Sequence[Span]) -> list[int]:
    """1 for each token with a character inside a span, 0 for the others. A span cut off by truncation has none."""
    offsets = encoding.offsets
    mask = [0] * len(offsets)
    real = [(i, begin, end) for i, (begin, end) in enumerate(offsets) if end > begin]
    for start, stop in spans:
        inside = [i for i, begin, end in real if end > start and begin < stop]
        if inside:
            mask[inside[0] : inside[-1] + 1] = [1] * (inside[-1] + 1 - inside[0])
    return mask


def _run(source: str, chat: Any, given: Mapping[str, Any], with_spans: bool) -> str:
    import jinja2

    token = _marking.set(with_spans)
    try:
        return _compiled(source).render(**{**given, "messages": chat})
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"The chat template is malformed at line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError as error:
        raise ChatTemplateError(f"The chat template refuses this conversation: {error}") from error
    except TypeError as error:  # a message without the fields, or with other types than the template expects
        raise ChatTemplateError(f"The chat template can't use this conversation: {error}") from error
    finally:
        _marking.reset(token)


@lru_cache(maxsize=64)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


@lru_cache(maxsize=64)
def _free_variables(source: str) -> frozenset[str]:
    """The variables that a template reads and does not set; empty where it can't be parsed."""
    import jinja2.meta

    try:
        return frozenset(jinja2.meta.find_undeclared_variables(_environment().parse(source)))
    except jinja2.TemplateError:
        return frozenset()


@lru_cache(maxsize=1)
def _environment() -> Any:
    import jinja2.ext
    import jinja2.nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

        def _marked(self, caller: Any) -> str:
            text = caller()
            return f"{_OPEN}{text}{_CLOSE}" if _marking.get() else text

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _take_marks(text: str) -> tuple[str, list[Span]]:
    """The text without marks, and the spans that they enclosed."""
    parts = text.split(_OPEN)
    clean, spans = parts[0], []
    for part in parts[1:]:
        inside, _, after = part.partition(_CLOSE)
        spans.append((len(clean), len(clean) + len(inside)))
        clean += inside + after
    return clean, spans


def _opened(chat: Any, field: str, source: str) -> Any:
    """A copy of the conversation whose last message ends in the mark."""
    if field not in source:
        raise bad_argument("continue_final_message", field, "a field that the chat template uses")
    chat = deepcopy(chat)
    content = chat[-1].get(field)
    if isinstance(content, str):
        chat[-1][field] = content + _CONTINUE
        return chat
    blocks = [block for block in content or () if "text" in block]
    if not blocks:
        raise bad_argument("continue_final_message", field, "a field of the last message that holds text")
    blocks[-1]["text"] += _CONTINUE
    return chat


def _cut(text: str, chat: Any, field: str) -> str:
    """The text up to the mark; without trailing space where the template trims messages."""
    content = chat[-1][field]
    if not isinstance(content, str):
        content = [block["text"] for block in content if "text" in block][-1]
    end = text.rfind(_CONTINUE.rstrip())
    if end < 0 or content.strip() not in text:
        raise ChatTemplateError(
            "continue_final_message: the chat template does not print the last message as it is (it may drop a part "
            f"of it), so it can't be continued.\nLast message: {content.strip()}"
        )
    return text[:end] if text[end:].startswith(_CONTINUE) else text[:end].rstrip()


def _check_documents(documents: Any) -> None:
    for document in documents or ():
        if not isinstance(document, Mapping):
            raise bad_argument("documents", document, "a list of dicts with 'title' and 'text'")


def _note_unused(source: str, tools: Any, documents: Any, asked: Mapping[str, Any], with_spans: bool) -> None:
    known = _free_variables(source)
    given = {"tools": tools, "documents": documents, **asked}
    unused = [name for name, value in given.items() if value is not None and name not in known]
    if unused and known:
        notice(f"the chat template does not use {', '.join(unused)}; it knows {', '.join(sorted(known))}", once=True)
    if with_spans and "generation" not in source:
        notice("assistant masks are all 0: the chat template has no {% generation %} block", once=True)
