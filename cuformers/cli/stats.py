"""What --stats says about one answer: how fast, how much memory traffic, which fraction of the card's."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import TYPE_CHECKING

from cuformers.cli.answer import Asked

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel
    from cuformers.auto.tokenizers.tokenizer import Tokenizer

WARM_UP_TOKENS = 4


@dataclass(frozen=True, kw_only=True)
class Stats:
    """Figures of one answer. None stands where there is nothing to measure."""

    device: str
    """Name of the GPU, or "CPU"."""
    prompt_tokens: int
    """Tokens of the prompt."""
    new_tokens: int
    """Tokens of the answer."""
    first_token_seconds: float
    """From the prompt to the first token."""
    prompt_tokens_per_second: float
    """Tokens of the prompt in that time."""
    decode_tokens_per_second: float | None
    """Tokens after the first one; None where there is one only."""
    gigabytes_per_second: float | None
    """10^9 bytes: weights, and cached keys and values, that decoding reads."""
    card_gigabytes_per_second: float | None
    """What the card's data sheet promises; None where none is known for it."""
    fraction_of_card: float | None
    """The former by the latter."""
    peak_bytes: int
    """The most memory that this process had taken of the device."""
    warm_up_seconds: float | None
    """Of a run of a few tokens before this one, which compiles, and records graphs; None where there was none."""

    def lines(self) -> list[str]:
        """For the eye."""
        from cuformers.cuda.memory import human

        prompt = f"{self.prompt_tokens} tokens, {self.prompt_tokens_per_second:,.1f} tokens/s"
        rows = {
            "prompt": f"{prompt}, first new token after {self.first_token_seconds * 1e3:,.1f} ms",
            "decode": "one token only: nothing to measure",
            "reads": "",
            "peak": f"{human(self.peak_bytes)} of the memory of {self.device}",
            "warm-up": "" if self.warm_up_seconds is None else f"{self.warm_up_seconds:.2f} s before",
        }
        if self.decode_tokens_per_second is not None:
            rows["decode"] = f"{self.new_tokens} tokens, {self.decode_tokens_per_second:,.1f} tokens/s"
            rows["reads"] = f"{self.gigabytes_per_second:,.2f} GB/s, {self._of_card()}"
        return [f"{name + ':':9}{text}" for name, text in rows.items() if text]

    def to_dict(self) -> dict[str, object]:
        """For --json."""
        return asdict(self)

    def _of_card(self) -> str:
        if self.fraction_of_card is None or self.card_gigabytes_per_second is None:
            return f"no figure is known for the memory of {self.device}"
        return f"{self.fraction_of_card:.1%} of the card's {self.card_gigabytes_per_second:,.0f}"


def measure(
    model: "PreTrainedModel", prompt_tokens: int, times: Sequence[float], warm_up_seconds: float | None = None
) -> Stats:
    """Figures from the times of the prompt and of each token; at least one token."""
    from cuformers.cuda.bandwidth import memory_bandwidth
    from cuformers.cuda.device import device_name
    from cuformers.cuda.memory import peak_bytes

    new = len(times) - 1
    first = times[1] - times[0]
    decode = times[-1] - times[1] if new > 1 else None
    speed = None if decode is None else decode_bytes(model, prompt_tokens, new - 1) / decode
    card = memory_bandwidth(model.device)
    return Stats(
        device=device_name(model.device),
        prompt_tokens=prompt_tokens,
        new_tokens=new,
        first_token_seconds=first,
        prompt_tokens_per_second=prompt_tokens / first,
        decode_tokens_per_second=None if decode is None else (new - 1) / decode,
        gigabytes_per_second=None if speed is None else speed / 1e9,
        card_gigabytes_per_second=None if card is None else card / 1e9,
        fraction_of_card=None if speed is None or card is None else speed / card,
        peak_bytes=peak_bytes(model.device),
        warm_up_seconds=warm_up_seconds,
    )


def decode_bytes(model: "PreTrainedModel", prompt_tokens: int, steps: int) -> int:
    """Bytes that decode steps after a prompt and its first new token read: every weight, and the keys and values.

    Of an embedding that is not the head too, a step reads one row, which is left out.
    """
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    idle = 0 if embedding is head else embedding.nbytes
    total = steps * (sum(p.nbytes for p in model.parameters()) - idle)
    for spec in model.model.attention_specs:
        row = 2 * spec.num_kv_heads * spec.head_dim * head.element_size()
        window = spec.window or prompt_tokens + steps
        total += row * sum(min(prompt_tokens + i, window) for i in range(1, steps + 1))
    return total


def warm_up(model: "PreTrainedModel", tokenizer: "Tokenizer", asked: Asked) -> float:
    """Begins the same answer and drops it, so that nothing is compiled or recorded while it is timed: seconds."""
    from cuformers.cuda.device import synchronize
    from cuformers.generation.stopping import MaxLengthCriteria

    start = perf_counter()
    stop = MaxLengthCriteria(asked.prompt_tokens + WARM_UP_TOKENS)
    model.generate(asked.ids, stopping_criteria=[stop], tokenizer=tokenizer, **asked.options)
    synchronize(model.device)
    return perf_counter() - start
