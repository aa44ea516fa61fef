"""Streamers: text while it is generated, printed or iterated over, behind Transformers' interface."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from queue import Queue
from typing import TYPE_CHECKING, Any

from cuformers.auto.tokenizers.detokenizer import HasDecoder, IncrementalDecoder

if TYPE_CHECKING:
    from torch import Tensor


class BaseStreamer:
    """What `generate(streamer=...)` calls. Subclass it for one of your own."""

    def put(self, value: "Tensor") -> None:
        """Takes tokens: first the prompt [1, L], then each new token [1]. They lie in host memory."""
        raise NotImplementedError(f"{type(self).__name__} does not define put(value).")

    def end(self) -> None:
        """Says that the generation is over."""
        raise NotImplementedError(f"{type(self).__name__} does not define end().")


class TextStreamer(BaseStreamer):
    """Prints the text to stdout while it is generated.

    The printed text is `tokenizer.decode` of all tokens and a newline. Each piece is printed as soon as no later token
    can change it; Transformers waits for whole words.

    Args:
        tokenizer: AutoTokenizer's, or one of Transformers' fast ones.
        skip_prompt: leave out the prompt.
        decode_kwargs: skip_special_tokens and clean_up_tokenization_spaces, as of `decode`.

    Raises:
        ValueError: the tokenizer is none of these.
    """

    def __init__(self, tokenizer: HasDecoder, skip_prompt: bool = False, **decode_kwargs: Any) -> None:
        self.tokenizer, self.skip_prompt, self.decode_kwargs = tokenizer, skip_prompt, decode_kwargs
        self.next_tokens_are_prompt = True
        self._decoder = IncrementalDecoder(tokenizer, **decode_kwargs)

    def put(self, value: "Tensor") -> None:
        """Takes tokens [n] or [1, n].

        Raises:
            ValueError: more than one row.
        """
        if value.dim() > 1 and value.shape[0] > 1:
            raise ValueError(
                f"{type(self).__name__} streams one row, but got {value.shape[0]}. Generate the prompts one by one."
            )
        is_prompt, self.next_tokens_are_prompt = self.next_tokens_are_prompt, False
        if not (is_prompt and self.skip_prompt):
            self.on_finalized_text(self._decoder.push(value.reshape(-1).tolist()))

    def end(self) -> None:
        """Hands out what was held back, and ends the stream."""
        self.next_tokens_are_prompt = True
        rest = self._decoder.finish()
        self._decoder = IncrementalDecoder(self.tokenizer, **self.decode_kwargs)
        self.on_finalized_text(rest, stream_end=True)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Called with each piece of text, which may be empty; override it to do something else than print."""
        print(text, flush=True, end=None if stream_end else "")


class TextIteratorStreamer(TextStreamer):
    """Iterates over the pieces of text in one thread while another one generates.

    Args:
        tokenizer, skip_prompt, decode_kwargs: as of TextStreamer.
        timeout: seconds to wait for a piece before queue.Empty is raised; None waits for ever.
    """

    def __init__(
        self, tokenizer: HasDecoder, skip_prompt: bool = False, timeout: float | None = None, **decode_kwargs: Any
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.text_queue: Queue[str | None] = Queue()
        self.stop_signal = None
        self.timeout = timeout

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Puts the piece into the queue, and the stop signal after the last one."""
        self.text_queue.put(text, timeout=self.timeout)
        if stream_end:
            self.text_queue.put(self.stop_signal, timeout=self.timeout)

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        piece = self.text_queue.get(timeout=self.timeout)
        if piece is None:
            raise StopIteration
        return piece


class AsyncTextIteratorStreamer(TextStreamer):
    """Iterates over the pieces of text in a coroutine while a thread generates. Make it inside the coroutine.

    Args:
        tokenizer, skip_prompt, decode_kwargs: as of TextStreamer.
        timeout: seconds to wait for a piece before TimeoutError is raised; None waits for ever.

    Raises:
        RuntimeError: there is no running event loop.
    """

    def __init__(
        self, tokenizer: HasDecoder, skip_prompt: bool = False, timeout: float | None = None, **decode_kwargs: Any
    ) -> None:
        super().__init__(tokenizer, skip_prompt, **decode_kwargs)
        self.text_queue: asyncio.Queue[str | None] = asyncio.Queue()
        self.stop_signal = None
        self.timeout = timeout
        self.loop = asyncio.get_running_loop()

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Puts the piece into the loop's queue, and the stop signal after the last one."""
        self.loop.call_soon_threadsafe(self.text_queue.put_nowait, text)
        if stream_end:
            self.loop.call_soon_threadsafe(self.text_queue.put_nowait, self.stop_signal)

    def __aiter__(self) -> AsyncIterator[str]:
        return self

    async def __anext__(self) -> str:
        async with asyncio.timeout(self.timeout):
            piece = await self.text_queue.get()
        if piece is None:
            raise StopAsyncIteration
        return piece
