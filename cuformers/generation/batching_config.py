"""ContinuousBatchingConfig: how the engine runs, with Transformers' names and defaults. Plain Python, no torch."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, NamedTuple

from cuformers.base.errors import bad_argument

KV_CACHE_DTYPES = ("auto", "fp8_e4m3", "fp8")
"""Names of what keys and values may be kept in; the last two are the same."""


@dataclass(kw_only=True)
class ContinuousBatchingConfig:
    """Options of the engine. Every way of setting a field checks its name and its value.

    It is mutable, as Transformers' is; a manager keeps a copy, so that a later change does not reach it.

    Raises:
        ValueError: an unknown field, or a value that is not possible here; the message says why.
    """

    block_size: int = 256
    """Tokens of a block, the unit of `num_blocks`. What is handed out and shared are the engine's own pages."""
    num_blocks: int | None = None
    """Blocks of the cache. None takes what memory allows."""
    max_batch_tokens: int | None = None
    """Most tokens of one step, prompts and answers together. None lets the engine choose."""
    max_memory_percent: float | None = None
    """Share of the free memory that the cache may take, above 0, up to 1. None lets the engine choose."""
    max_requests_per_batch: int | None = None
    """Most requests that run at once; the others wait. None lets the engine choose."""
    max_blocks_per_request: int | None = None
    """Only None: decoding reads block tables of any length."""
    allow_block_sharing: bool = True
    """Whether requests with the same beginning share its pages, also after the first of them has ended."""
    use_async_batching: bool | None = None
    """Whether the host prepares steps ahead of the tokens that it has seen. None: on a GPU."""
    use_cuda_graph: bool | tuple[bool, bool] | None = None
    """Whether steps are captured. None: on a GPU. A tuple's values, of prompts and of decodes, must be the same."""
    q_padding_interval_size: int = 0
    """Only 0: sizes of captured steps are chosen by the engine."""
    kv_padding_interval_size: int = 0
    """Only 0: a captured step reads its lengths on the device, none is padded."""
    varlen_compile_config: Any = None
    """Only None: nothing is compiled by torch.compile."""
    decode_compile_config: Any = None
    """Only None, as varlen_compile_config."""
    default_compile_level: int = 0
    """Only 0, as varlen_compile_config."""
    scheduler_type: str = "fifo"
    """Only "fifo": what runs goes on, then requests in the order of their priority and arrival."""
    safety_margin: float | None = None
    """Share of the cache that a new request leaves free where others run, to grow into. None lets the engine choose."""
    return_logprobs: bool = False
    """Whether outputs hold the log-probability of each generated token."""
    seed: int | None = None
    """Makes the draws of requests without a seed of their own repeatable, by the order of their submission."""
    cpu_offload_space: float | None = 0.0
    """GiB of page-locked host memory where requests that have to give way leave their keys, to go on from there.
    0: they are computed anew, mostly from pages that are still in the cache."""
    cpu_offload_space_safety_threshold: float = 0.8
    """Share of the host's memory that cpu_offload_space may not pass."""
    max_queue_size: int = 0
    """Most requests that may wait for their first token; a submission beyond is refused. 0: no limit."""
    per_request_processors: bool = False
    """Without effect: every request always has its own options."""
    drop_unsupported_processors: bool = True
    """Without effect: no logits processor has to be dropped."""
    disable_nccl_graph_mixing: bool = True
    """Only True: the engine runs on one GPU, without NCCL."""
    cpu_group_timeout: float | None = 300.0
    """Only 300, as disable_nccl_graph_mixing."""
    use_default_compile_configs: bool | None = None
    """Only None or False, as varlen_compile_config."""
    max_cached_graphs: int | None = None
    """Only None: sizes of captured steps are few by themselves."""
    page_size: int | None = None
    """The name of block_size in newer releases; setting it sets both."""
    kv_cache_dtype: str = "auto"
    """What keys and values are kept in: "auto" is the model's dtype, "fp8_e4m3" ("fp8") takes half the bytes."""

    def __setattr__(self, name: str, value: Any) -> None:
        check_field(name, value)
        super().__setattr__(name, value)
        if name == "page_size" and value is not None:
            super().__setattr__("block_size", value)

    @property
    def cache_tokens(self) -> int | None:
        """Tokens that the cache is to hold; None where the memory decides."""
        return None if self.num_blocks is None else self.num_blocks * self.block_size

    @property
    def use_graphs(self) -> bool | None:
        """Whether steps are captured; None where it is left to the engine."""
        return self.use_cuda_graph[0] if isinstance(self.use_cuda_graph, tuple) else self.use_cuda_graph


class _Rule(NamedTuple):
    allowed: str
    holds: Callable[[Any], bool]
    remedy: str = ""


def check_field(name: str, value: Any) -> None:
    """Raises ValueError for an unknown field, or a value that is not possible."""
    if name not in _RULES:
        near = get_close_matches(name, _RULES, n=3)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"The fields are: {', '.join(_RULES)}."
        raise ValueError(f"{name!r} is not a field of ContinuousBatchingConfig. {hint}")
    rule = _RULES[name]
    if not rule.holds(value):
        raise bad_argument(name, value, rule.allowed, rule.remedy)


def _whole(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _share(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and 0 <= value <= 1


def _graphs(value: Any) -> bool:
    return value in ((True, True), (False, False)) or value is None or isinstance(value, bool)


def _count(least: int) -> _Rule:
    return _Rule(f"an integer from {least}, or None", lambda v: v is None or _whole(v, least))


def _only(neutral: Any, why: str, *also: Any) -> _Rule:
    """A field that only its default fits, because what it tunes does not exist here."""
    allowed = (neutral, *also)
    kinds = {type(v) for v in allowed} | ({int} if isinstance(neutral, float) else set())
    return _Rule(" or ".join(map(repr, allowed)), lambda v: type(v) in kinds and v in allowed, f"Leave it out: {why}")


_FLAG = _Rule("True or False", lambda v: isinstance(v, bool))
_SWITCH = _Rule("True, False or None", lambda v: v is None or isinstance(v, bool))
_COMPILE = "no step is compiled by torch.compile, and none takes minutes to warm up."
_LENGTHS = "a captured step reads its lengths on the device, so that one of a size serves all."
_ONE_GPU = "the engine runs on one GPU and needs no NCCL."
_RULES: Mapping[str, _Rule] = {
    "block_size": _Rule("an integer from 4", lambda v: _whole(v, 4)),
    "num_blocks": _count(1),
    "max_batch_tokens": _count(1),
    "max_memory_percent": _Rule("a share above 0, up to 1, or None", lambda v: v is None or (_share(v) and v > 0)),
    "max_requests_per_batch": _count(1),
    "max_blocks_per_request": _only(None, "decoding reads block tables of any length."),
    "allow_block_sharing": _FLAG,
    "use_async_batching": _SWITCH,
    "use_cuda_graph": _Rule("True, False, a tuple of twice the same, or None", _graphs),
    "q_padding_interval_size": _only(0, _LENGTHS),
    "kv_padding_interval_size": _only(0, _LENGTHS),
    "varlen_compile_config": _only(None, _COMPILE),
    "decode_compile_config": _only(None, _COMPILE),
    "default_compile_level": _only(0, _COMPILE),
    "scheduler_type": _only("fifo", "answers and prompts share every step, so that neither has to go first."),
    "safety_margin": _Rule("a share from 0 to 1, or None", lambda v: v is None or _share(v)),
    "return_logprobs": _FLAG,
    "seed": _Rule("an integer, or None", lambda v: v is None or (isinstance(v, int) and not isinstance(v, bool))),
    "cpu_offload_space": _Rule("a number of GiB from 0", _amount),
    "cpu_offload_space_safety_threshold": _Rule("a share from 0 to 1", _share),
    "max_queue_size": _Rule("an integer from 0 (no limit)", lambda v: _whole(v, 0)),
    "per_request_processors": _FLAG,
    "drop_unsupported_processors": _FLAG,
    "disable_nccl_graph_mixing": _only(True, _ONE_GPU),
    "cpu_group_timeout": _only(300.0, _ONE_GPU),
    "use_default_compile_configs": _only(None, _COMPILE, False),
    "max_cached_graphs": _only(None, "the sizes of captured steps are few by themselves."),
    "page_size": _Rule("an integer from 4, or None", lambda v: v is None or _whole(v, 4)),
    "kv_cache_dtype": _Rule(f"one of {list(KV_CACHE_DTYPES)}", lambda v: v in KV_CACHE_DTYPES),
}
assert [f.name for f in fields(ContinuousBatchingConfig)] == [*_RULES], "each field has its rule, in the same order"
