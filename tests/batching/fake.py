"""An engine without a model: the next token is a function of the text so far. It checks how it is used."""

import threading
from collections import deque
from dataclasses import dataclass

import pytest
import torch

from cuformers.auto.batching.manager import ContinuousBatchingManager
from cuformers.engine.request import Finish, Request
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.config import GenerationConfig

VOCABULARY = 50


needs_logprobs = pytest.mark.skipif(
    "logprobs" not in Request.__dataclass_fields__, reason="requests of the engine have no log-probabilities"
)


def next_token(context: list[int]) -> int:
    """3 to 49, of the last three tokens and the length."""
    a, b, c = [0, 0, 0, *context][-3:]
    return 3 + (a * 7 + b * 5 + c * 3 + len(context)) % (VOCABULARY - 3)


def answer(prompt: list[int], count: int) -> list[int]:
    """What the engine generates."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context))
    return context[len(prompt) :]


@dataclass(frozen=True)
class FakeStats:
    num_waiting: int
    num_running: int
    num_blocks: int = 40
    num_free: int = 20
    num_cached: int = 10


class FakeEngine:
    """Runs up to `rows` requests, none longer than `longest`; steps wait for `gate` where there is one."""

    def __init__(self, *, rows: int = 4, longest: int = 1000, gate: threading.Semaphore | None = None) -> None:
        self.device = torch.device("cpu")
        self.rows, self.longest, self.gate = rows, longest, gate
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.steps = self.warm_ups = self.refreshes = 0
        self.asleep = False
        self.told: list[str] = []
        """What it was told of weights and of sleep."""
        self.wake_error: Exception | None = None
        self.broken: list[Exception] = []
        """Raised by the next steps, one each."""
        self.reset_error: Exception | None = None
        self.most_running = 0
        self.added: list[Request] = []
        self._thread: int | None = None

    @property
    def stats(self) -> FakeStats:
        return FakeStats(num_waiting=len(self.waiting), num_running=len(self.running))

    def add(self, request: Request) -> None:
        self._one_thread()
        assert request.prompt and all(0 <= t < VOCABULARY for t in request.prompt), "such a request breaks an engine"
        if request.max_length > self.longest:
            raise ValueError(f"a request of {request.max_length} tokens does not fit {self.longest}.")
        self.waiting.append(request)
        self.added.append(request)

    def cancel(self, request: Request) -> None:
        self._one_thread()
        self._end(request, Finish.CANCELLED)

    def step(self) -> bool:
        self._one_thread()
        assert not torch.is_grad_enabled()
        assert not self.asleep, "a sleeping engine has nothing to compute with"
        while self.waiting and len(self.running) < self.rows:
            self.running.append(self.waiting.popleft())
        self.most_running = max(self.most_running, len(self.running))
        if not self.running:
            return False
        if self.gate is not None:
            self.gate.acquire()
        self.steps += 1
        if self.broken:
            raise self.broken.pop()
        for request in list(self.running):
            token = next_token(request.context)
            if getattr(request, "logprobs", None) is not None:
                request.token_logprobs.append(-float(token))
            finish = request.take(token)
            if finish is not None:
                self._end(request, finish)
        return True

    def reset(self) -> None:
        self._one_thread()
        if self.reset_error is not None:
            raise self.reset_error
        for request in [*self.running, *self.waiting]:
            self._end(request, Finish.FAILED)

    def warm_up(self) -> None:
        self._one_thread()
        self.warm_ups += 1

    def refresh(self) -> None:
        self._one_thread()
        self.refreshes += 1

    def update_weights(self, *, restart: bool) -> None:
        self._one_thread()
        self.told.append(f"update restart={restart}")

    def sleep(self, *, weights: bool) -> None:
        self._one_thread()
        self.waiting.extendleft(reversed(self.running))
        self.running, self.asleep = [], True
        self.told.append(f"sleep weights={weights}")

    def wake(self) -> None:
        self._one_thread()
        if self.wake_error is not None:
            raise self.wake_error
        self.asleep = False
        self.told.append("wake")

    def _end(self, request: Request, finish: Finish) -> None:
        if request.finish is None:
            (self.running if request in self.running else self.waiting).remove(request)
            request.end(finish)

    def _one_thread(self) -> None:
        """All calls since the last rest come from one thread, as a manager may be started again in another."""
        here = threading.get_ident()
        if not (self.running or self.waiting):
            self._thread = here
        assert self._thread == here, "the engine is called from two threads"


def manager_of(
    engine: FakeEngine, config: ContinuousBatchingConfig | None = None, **options: object
) -> ContinuousBatchingManager:
    """A manager of the engine, whose checkpoint generates 5 tokens."""
    return ContinuousBatchingManager(
        lambda: engine,
        vocab_size=VOCABULARY,
        max_positions=1000,
        defaults=GenerationConfig(max_new_tokens=5),
        generation_config=GenerationConfig(**options) if options else None,
        config=config,
    )
