"""What a text pipeline may be given: texts, chats, lists of them, and streams."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch.utils.data import Dataset

from cuformers.base.errors import bad_argument

ALLOWED = (
    "a string, a chat (a list of {'role': ..., 'content': ...}), a list of these, a generator or a dataset of these"
)


class Chat(NamedTuple):
    """A conversation."""

    messages: list[dict[str, Any]]
    """Each with "role" and "content"."""

    @property
    def continues(self) -> bool:
        """Whether its last message is the model's own, which is then gone on with."""
        return self.messages[-1]["role"] == "assistant"


Prompt = str | Chat


class Inputs(NamedTuple):
    """The prompts of a call."""

    prompts: Iterable[Prompt]
    """All of them, or a stream."""
    form: str
    """"one", "list", or "stream": what the caller gets back."""


def read_inputs(given: Any) -> Inputs:
    """Recognizes what a pipeline was called with.

    A list of messages is one chat; a list of lists of messages is several. A generator that yields messages is one
    chat too. Any other iterable, and any torch Dataset, is a stream: it is read as its answers are asked for.

    Raises:
        ValueError: none of these; for a stream, when the wrong element is reached.
    """
    if isinstance(given, str | Chat):
        return Inputs([given], "one")
    if isinstance(given, list | tuple):
        if given and is_message(given[0]):
            return Inputs([as_chat(given)], "one")
        return Inputs([as_prompt(item) for item in given], "list")
    if isinstance(given, Mapping):
        raise bad_argument("text_inputs", given, ALLOWED, "For a chat, put the message into a list.")
    if isinstance(given, Dataset):
        return Inputs((as_prompt(item) for item in _items(given)), "stream")
    if isinstance(given, Iterable):
        return _read_stream(iter(given))
    raise bad_argument("text_inputs", given, ALLOWED)


def _read_stream(items: Iterator[Any]) -> Inputs:
    first = list(islice(items, 1))
    if first and is_message(first[0]):
        return Inputs([as_chat([*first, *items])], "one")
    return Inputs((as_prompt(item) for part in (first, items) for item in part), "stream")


def _items(dataset: Dataset) -> Iterator[Any]:
    if isinstance(dataset, Iterable):
        return iter(dataset)
    return (dataset[i] for i in range(len(dataset)))  # type: ignore[arg-type]  # a map-style dataset has a length


def as_prompt(item: Any) -> Prompt:
    """One element of a list or a stream.

    Raises:
        ValueError: neither a text nor a chat.
    """
    if isinstance(item, str | Chat):
        return item
    if isinstance(item, list | tuple) and item and is_message(item[0]):
        return as_chat(item)
    remedy = (
        "Of a dataset's rows, pass one field: (row['text'] for row in dataset)." if isinstance(item, Mapping) else ""
    )
    raise bad_argument("an element of text_inputs", item, "a string or a chat", remedy)


def as_chat(messages: Sequence[Any]) -> Chat:
    """A list of messages as a chat.

    Raises:
        ValueError: one of them is no message.
    """
    wrong = next((m for m in messages if not is_message(m)), None)
    if wrong is not None:
        raise bad_argument("a message of the chat", wrong, "a dict with 'role' and 'content'")
    return Chat(list(messages))


def is_message(value: Any) -> bool:
    """Whether it is a dict with "role" and "content"."""
    return isinstance(value, dict) and "role" in value and "content" in value


def batches(prompts: Iterable[Prompt], size: int) -> Iterator[list[Prompt]]:
    """The prompts in groups of `size`, read as they are asked for."""
    items = iter(prompts)
    while batch := list(islice(items, size)):
        yield batch
