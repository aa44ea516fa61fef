"""One answer on its way to the user: shown as it comes, timed, and stopped by Ctrl-C at a token."""

import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

from cuformers.auto.streamers import TextStreamer

if TYPE_CHECKING:
    import torch

    from cuformers.auto.model import PreTrainedModel
    from cuformers.auto.tokenizers.tokenizer import Tokenizer


def show(text: str) -> None:
    """Writes a piece of text to stdout at once."""
    if text:
        print(text, end="", flush=True)


@dataclass
class Interrupt:
    """Whether the user has pressed Ctrl-C."""

    pressed: bool = False


@contextmanager
def interruptible() -> Iterator[Interrupt]:
    """Ctrl-C is noted, for a streamer to act on between two tokens; the second one interrupts at once."""
    interrupt = Interrupt()

    def note(signum: int, frame: Any) -> None:
        if interrupt.pressed:
            raise KeyboardInterrupt
        interrupt.pressed = True

    if threading.current_thread() is not threading.main_thread():
        yield interrupt  # signals go to the main thread only
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)


class AnswerStreamer(TextStreamer):
    """Takes an answer's tokens, with their times, and hands out its text.

    Args:
        tokenizer: makes the text.
        write: given each piece of text.
        with_prompt: also write the prompt, as the tokenizer reads it back.
        interrupt: raises KeyboardInterrupt from `put` when it is pressed.
    """

    def __init__(
        self,
        tokenizer: "Tokenizer",
        write: Callable[[str], None],
        *,
        with_prompt: bool,
        interrupt: Interrupt | None = None,
    ) -> None:
        super().__init__(tokenizer, skip_prompt=not with_prompt, skip_special_tokens=True)
        self.tokens: list[int] = []
        self.times: list[float] = []
        """When the prompt went in, and when each token came; seconds."""
        self.text = ""
        self._write, self._interrupt = write, interrupt or Interrupt()

    def put(self, value: "torch.Tensor") -> None:
        """Takes the prompt, then each token."""
        self.times.append(perf_counter())
        if not self.next_tokens_are_prompt:
            self.tokens += value.reshape(-1).tolist()
        super().put(value)
        if self._interrupt.pressed:
            raise KeyboardInterrupt

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Writes a piece; what comes with the answer's tokens is the answer's."""
        if self.tokens:
            self.text += text
        self._write(text)


class Answer(NamedTuple):
    """What came of a prompt."""

    text: str
    """Without the prompt."""
    tokens: list[int]
    """Generated ones, the end-of-text token included."""
    finish: str
    """"eos", "length", "stop" (a stop string or the time), or "interrupt"."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt as tokens, and how to continue it."""

    ids: "torch.Tensor | None"
    """[1, L]; None starts from the beginning-of-text token."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Fields of GenerationConfig, max_new_tokens among them."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return 1 if self.ids is None else self.ids.shape[1]


def stream(
    model: "PreTrainedModel",
    tokenizer: "Tokenizer",
    asked: Asked,
    write: Callable[[str], None] = show,
    *,
    with_prompt: bool = False,
) -> tuple[Answer, list[float]]:
    """Generates one answer and writes it as it comes. Ctrl-C ends it; what was said until then is the answer.

    Returns:
        The answer, and the times of prompt and tokens.
    """
    with interruptible() as interrupt:
        streamer = AnswerStreamer(tokenizer, write, with_prompt=with_prompt, interrupt=interrupt)
        try:
            model.generate(asked.ids, streamer=streamer, tokenizer=tokenizer, **asked.options)
            finish = finish_reason(streamer.tokens, model, asked)
        except KeyboardInterrupt:
            streamer.end()
            finish = "interrupt"
    return Answer(streamer.text, streamer.tokens, finish), streamer.times


def several(model: "PreTrainedModel", tokenizer: "Tokenizer", asked: Asked) -> list[Answer]:
    """The num_return_sequences answers, each as `stream` would give it."""
    sequences = model.generate(asked.ids, tokenizer=tokenizer, **asked.options)
    prompt, ends = sequences[0, : asked.prompt_tokens].tolist(), end_tokens(model, asked.options)
    shown = tokenizer.decode(prompt, skip_special_tokens=True)
    answers = []
    for row in sequences[:, asked.prompt_tokens :].tolist():
        length = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
        tokens = row[:length]
        whole = tokenizer.decode(prompt + tokens, skip_special_tokens=True)
        answers.append(Answer(whole.removeprefix(shown), tokens, finish_reason(tokens, model, asked)))
    return answers


def finish_reason(tokens: Sequence[int], model: "PreTrainedModel", asked: Asked) -> str:
    """Why an answer that was not interrupted ended."""
    if tokens and tokens[-1] in end_tokens(model, asked.options):
        return "eos"
    limit = asked.options.get("max_new_tokens") or asked.options["max_length"] - asked.prompt_tokens
    return "length" if len(tokens) >= limit else "stop"


def end_tokens(model: "PreTrainedModel", options: Mapping[str, Any]) -> list[int]:
    """The tokens that end an answer."""
    ends = options.get("eos_token_id", model.generation_config.eos_token_id)
    return [ends] if isinstance(ends, int) else list(ends or ())


def completed(
    model: "PreTrainedModel", given: Mapping[str, Any], prompt_tokens: int, most: int, remedy: str = "shorten it"
) -> dict[str, Any]:
    """The user's options with a length and, where tokens are drawn, a seed that is new each time.

    Args:
        model: whose generation_config may say both.
        given: by the user.
        prompt_tokens: of the prompt.
        most: tokens of an answer where nobody says anything; fewer where the model's positions end before.
        remedy: for a prompt that leaves no room.

    Raises:
        ValueError: the prompt fills the model's positions, and no length is given.
    """
    options, config = dict(given), model.generation_config
    if options.get("max_new_tokens") is None and options.get("max_length") is None:
        options["max_new_tokens"] = config.max_new_tokens or _room(model, prompt_tokens, most, remedy)
    if options.get("do_sample", config.do_sample) and options.get("seed", config.seed) is None:
        import secrets

        options["seed"] = secrets.randbits(32)  # torch's generator begins each process alike
    return options


def _room(model: "PreTrainedModel", prompt_tokens: int, most: int, remedy: str) -> int:
    positions = model.config.max_position_embeddings
    if prompt_tokens >= positions:
        raise ValueError(
            f"the prompt has {prompt_tokens} tokens and the model {positions} positions: {remedy}, "
            "or set --max-new-tokens to go past the model's length."
        )
    return min(most, positions - prompt_tokens)


def complain(text: str) -> None:
    """One line on stderr, as the command line says its errors."""
    print(f"cuformers: {text}", file=sys.stderr, flush=True)
