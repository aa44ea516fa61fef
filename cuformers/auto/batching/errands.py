"""Errands: what the engine's thread does between two steps, for somebody who waits for it."""

from collections.abc import Callable
from concurrent.futures import Future

from cuformers.auto.batching.engine_like import EngineLike

Do = Callable[[EngineLike], None]


class Errand:
    """Made by the one who waits; run, or refused, by the engine's thread."""

    def __init__(self, do: Do) -> None:
        self._do, self._done = do, Future[None]()

    def run(self, engine: EngineLike) -> None:
        """Does it, and tells the waiting thread.

        Raises:
            Exception: what went wrong, where that was no refusal (ValueError): the engine may be broken then.
        """
        try:
            self._do(engine)
        except ValueError as error:
            self._done.set_exception(error)
        except Exception as error:
            self._done.set_exception(error)
            raise
        else:
            self._done.set_result(None)

    def refuse(self, reason: str) -> None:
        """Tells the waiting thread that it won't be done."""
        self._done.set_exception(RuntimeError(reason))

    def wait(self) -> None:
        """Waits for the end.

        Raises:
            Exception: what went wrong.
        """
        self._done.result()
