"""What continuous batching needs of an engine. One thread makes all of the calls."""

from typing import Protocol

import torch

from cuformers.engine.request import Request


class EngineStats(Protocol):
    """Figures of the engine between two steps."""

    @property
    def num_waiting(self) -> int:
        """Requests that do not run yet."""
        ...

    @property
    def num_running(self) -> int:
        """Requests that run."""
        ...

    @property
    def num_blocks(self) -> int:
        """Pages of the cache."""
        ...

    @property
    def num_free(self) -> int:
        """Pages that hold nothing of use."""
        ...

    @property
    def num_cached(self) -> int:
        """Pages that no running request holds, but that a later one may find."""
        ...


class EngineLike(Protocol):
    """Runs requests, a step at a time."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        ...

    @property
    def stats(self) -> EngineStats:
        """The present figures."""
        ...

    @property
    def asleep(self) -> bool:
        """Whether it has no memory to compute with: requests may come and be cancelled, and none runs."""
        ...

    def add(self, request: Request) -> None:
        """Takes a request.

        Raises:
            ValueError: it can never run; nothing has happened then.
        """
        ...

    def cancel(self, request: Request) -> None:
        """Ends a request now, whatever it is doing; `on_end` is called with Finish.CANCELLED."""
        ...

    def step(self) -> bool:
        """Starts or collects a step, calling `on_token` and `on_end` of the requests; False: nothing is to do.

        After an exception what was in flight is lost, and `reset` must be called.
        """
        ...

    def reset(self) -> None:
        """Ends all requests with Finish.FAILED, and can then be used again."""
        ...

    def warm_up(self) -> None:
        """Prepares what the first steps would otherwise wait for; while awake."""
        ...

    def refresh(self) -> None:
        """Called before the next step after a time in which the model's weights may have changed."""
        ...

    def update_weights(self, *, restart: bool) -> None:
        """Shares nothing any more that was computed so far; with `restart` what runs is computed anew."""
        ...

    def sleep(self, *, weights: bool) -> None:
        """Frees its memory, with `weights` the model's too. What runs waits with its tokens. Asleep: no error.

        Raises:
            ValueError: the weights can't be moved; nothing has happened then.
        """
        ...

    def wake(self) -> None:
        """Takes the memory again, so that what waits can run. Awake: no error.

        Raises:
            ValueError: there is not enough memory; it sleeps on.
        """
        ...
