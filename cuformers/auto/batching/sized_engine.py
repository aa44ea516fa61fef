"""The engine of a manager: sized once, by its ContinuousBatchingConfig, for whatever requests may come."""

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from cuformers.base.errors import OutOfDeviceMemory, bad_argument
from cuformers.cuda import memory
from cuformers.cuda.memory import human
from cuformers.engine.cache_dtype import wants_fp8
from cuformers.engine.capacity import MAX_ROWS, MIN_LENGTH, PAGE_SIZE, Capacity, power_of_two
from cuformers.engine.engine import Engine
from cuformers.engine.planner import WATERMARK
from cuformers.engine.request import Request, Sampling
from cuformers.engine.stats import Stats
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.fused import MAX_BIASED
from cuformers.kernels.cache_scales import FP8
from cuformers.nn.cache import PagedCache, layout

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel

MAX_BATCH_TOKENS = 8192
MAX_EOS = 32
GPU_SHARE, HOST_SHARE = 0.9, 0.25
"""Of the free memory, for the cache: a GPU is for this, a host's memory is for others too."""
NO_LIMIT = 32768
"""Tokens of a request where the model names no longest text."""
LOOK_EVERY = 64
"""Steps between two looks at whether the weights have changed, where requests always run."""
_BEFORE_ALL = -(1 << 62)
"""A priority."""
_WARM_UP = ((1, 0.0), (1, 1.0), (8, 0.0))
"""(requests at once, temperature)."""


class SizedEngine:
    """An Engine whose buffers do not grow, so that requests can be added while others run."""

    def __init__(self, model: "PreTrainedModel", config: ContinuousBatchingConfig) -> None:
        """
        Raises:
            ValueError: what the config asks for is not possible on the model's device.
            OutOfDeviceMemory: the cache does not fit.
        """
        usual = model.engine  # of generate: knows what this model allows
        check_possible(config, usual)
        self.model, self.device = model, model.device
        self.engine = Engine(
            model,
            usual.backend,
            use_graphs=usual.use_graphs if config.use_graphs is None else config.use_graphs,
            max_batch_tokens=config.max_batch_tokens or MAX_BATCH_TOKENS,
            prefix_cache=config.allow_block_sharing,
            watermark=WATERMARK if config.safety_margin is None else config.safety_margin,
            host_bytes=host_bytes(config),
            kv_cache_dtype=config.kv_cache_dtype,
        )
        if config.use_async_batching is False:
            self.engine.lag = 0
        self.capacity = capacity_for(model, config, self.engine.beside_cache)
        self.asleep, self._steps = False, 0
        self._configure()

    @property
    def stats(self) -> Stats:
        """The present figures."""
        assert self.engine.planner is not None
        return self.engine.planner.stats()

    def add(self, request: Request) -> None:
        """Takes a request.

        Raises:
            ValueError: it can never run.
        """
        if request.max_length > self.capacity.length:
            raise ValueError(
                f"a request of {request.max_length} tokens, prompt and answer, is longer than the longest one here, "
                f"{self.capacity.length}: shorten the prompt or max_new_tokens."
            )
        if len(request.eos) > self.capacity.eos:
            raise bad_argument("eos_token_id", list(request.eos), f"at most {self.capacity.eos} tokens")
        if not self._busy:
            self._look()
        self.engine.add(request)

    def cancel(self, request: Request) -> None:
        """Ends a request now."""
        self.engine.cancel(request)

    def step(self) -> bool:
        """Starts or collects a step; False: nothing is to do."""
        self._steps += 1
        if self._steps % LOOK_EVERY == 0:
            self._look()
        return self.engine.step()

    def reset(self) -> None:
        """Ends all requests as failed."""
        self.engine.reset()

    def refresh(self) -> None:
        """Looks at the model: where it has changed nothing cached before counts any more."""
        if self._computed_with != self._present():
            self._configure()
            assert self.engine.planner is not None
            self.engine.planner.new_epoch()

    def update_weights(self, *, restart: bool) -> None:
        """Shares nothing any more that was computed so far; with `restart` what runs is computed anew."""
        if not self.asleep:
            self._configure()
        self.engine.forget(restart=restart)

    def sleep(self, *, weights: bool) -> None:
        """Frees the cache, the table and the captured steps, with `weights` the model's memory too.

        Raises:
            ValueError: the model is spread over devices, so that its weights can't be moved.
        """
        if weights and self.model.model.runs_on is not None:
            raise bad_argument("weights", True, "False for a model that is spread over devices")
        self.engine.release()
        self.asleep = True
        if weights:
            self.model.to("cpu")
            self.engine.backend = None  # it may hold memory of its own
        gc.collect()  # captured steps may be part of cycles
        memory.release_cached(self.device)

    def wake(self) -> None:
        """Brings the weights back to where they were, and makes cache and table anew.

        Raises:
            OutOfDeviceMemory: they don't fit; it sleeps on.
        """
        if not self.asleep:
            return
        try:
            if self.model.device != self.device:
                self.model.to(self.device)
            self._configure()
        except torch.OutOfMemoryError as error:
            raise OutOfDeviceMemory(
                f"the manager can't wake, as {human(memory.free_bytes(self.device))} are free on {self.device}, and "
                "its cache and the weights need more: free memory, then call wake() again."
            ) from error
        self.asleep = False

    def warm_up(self) -> None:
        """Runs short requests, which compiles kernels and captures the commonest steps; before all that waits."""
        for count, temperature in _WARM_UP:
            sampling = Sampling(temperature=temperature)
            own = [
                Request(prompt=[0], max_new_tokens=3, sampling=sampling, priority=_BEFORE_ALL)
                for _ in range(min(count, self.capacity.rows))
            ]
            for request in own:
                self.add(request)
            while self.step() and (not self._busy or any(request.finish is None for request in own)):
                pass

    @property
    def _busy(self) -> bool:
        assert self.engine.planner is not None
        return self.engine.planner.busy

    def _configure(self) -> None:
        self.engine.backend = self.model.engine.backend
        self.engine.configure(self.capacity)
        self._computed_with = self._present()
        self._parameters = tuple(self.model.parameters())
        self._seen = self._versions()

    def _look(self) -> None:
        """Notices changed weights, some microseconds for each hundred of them."""
        if not self.asleep and self._versions() != self._seen:
            self.refresh()

    def _versions(self) -> tuple[object, ...]:
        return (self.model.adapters.version, *((p.data_ptr(), p._version) for p in self._parameters))

    def _present(self) -> tuple[object, ...]:
        """Kernels, attention, adapters and weights of the model."""
        weights = ((p.data_ptr(), p._version) for p in self.model.parameters())
        return (self.model.ops, self.model.engine.backend, self.model.adapters.version, *weights)


def check_possible(config: ContinuousBatchingConfig, usual: Engine) -> None:
    """Raises ValueError for what only a GPU that holds all weights can do, where there is none."""
    remedy = "It needs a GPU that holds all weights."
    if config.use_graphs and not usual.captures:
        raise bad_argument("use_cuda_graph", config.use_cuda_graph, "False or None for this model", remedy)
    if config.use_async_batching and not usual.lag:
        raise bad_argument("use_async_batching", True, "False or None for this model", remedy)


def host_bytes(config: ContinuousBatchingConfig) -> int:
    """Host memory for the keys of requests that give way.

    Raises:
        ValueError: more than the host may give.
    """
    wanted = int((config.cpu_offload_space or 0) * 2**30)
    most = int(memory.total_bytes("cpu") * config.cpu_offload_space_safety_threshold)
    if wanted > most:
        allowed = f"at most {most / 2**30:.1f}, cpu_offload_space_safety_threshold of the host's memory"
        raise bad_argument("cpu_offload_space", config.cpu_offload_space, allowed)
    return wanted


def capacity_for(
    model: "PreTrainedModel", config: ContinuousBatchingConfig, beside_cache: Callable[[Capacity], int]
) -> Capacity:
    """What the engine's buffers are made for.

    Args:
        model: whose cache it is.
        config: what is asked for.
        beside_cache: bytes that steps take beside a cache; asked only where the memory is the limit.

    Raises:
        OutOfDeviceMemory: the cache that was asked for does not fit, or none does.
    """
    specs = model.model.attention_specs
    dtype = FP8 if wants_fp8(config.kv_cache_dtype, [model]) else model.lm_head.weight.dtype
    groups = layout([spec.window for spec in specs], apart=len(set(model.model.layer_devices)) == 1)
    rows = config.max_requests_per_batch or MAX_ROWS
    longest = max(MIN_LENGTH, power_of_two(model.config.max_position_embeddings or NO_LIMIT))
    full = rows * -(-longest // PAGE_SIZE) * len(groups.windows)
    share = config.max_memory_percent or (GPU_SHARE if model.device.type == "cuda" else HOST_SHARE)
    page = PagedCache.page_bytes(groups.size, specs[0].num_kv_heads, specs[0].head_dim, PAGE_SIZE, dtype)
    free = memory.free_bytes(model.device)
    limit = int(free * share) // page
    if config.cache_tokens is None and full > limit:
        steps = beside_cache(Capacity(rows=rows, length=longest, pages=1, eos=MAX_EOS, bias=MAX_BIASED))
        limit = int(max(0, free - steps) * share) // page
    if config.cache_tokens is None:
        pages = min(full, limit)
    else:
        pages = -(-config.cache_tokens // PAGE_SIZE) * len(groups.windows)
    if pages > limit or pages < 1:
        raise OutOfDeviceMemory(
            f"the cache needs {human(max(pages, 1) * page)}, and max_memory_percent={share} leaves "
            f"{human(limit * page)}: lower num_blocks, raise max_memory_percent, or free memory."
        )
    length = min(longest, -(-pages // len(groups.windows)) * PAGE_SIZE)
    return Capacity(rows=rows, length=length, pages=pages, eos=MAX_EOS, bias=MAX_BIASED)
