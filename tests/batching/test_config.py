"""ContinuousBatchingConfig: Transformers' fields and defaults, each honoured or refused with a reason."""

import dataclasses
import subprocess
import sys

import pytest
import transformers

from cuformers.generation.batching_config import ContinuousBatchingConfig
from tests.paths import ROOT

OURS = {f.name: f.default for f in dataclasses.fields(ContinuousBatchingConfig)}
THEIRS = {f.name: f.default for f in dataclasses.fields(transformers.ContinuousBatchingConfig)}


def test_fields_and_defaults_are_transformers() -> None:
    assert {name: OURS[name] for name in THEIRS} == THEIRS
    assert OURS.keys() - THEIRS.keys() == {"page_size", "kv_cache_dtype"}


@pytest.mark.parametrize(("name", "value"), [
    ("block_size", 3), ("block_size", 16.0), ("num_blocks", 0), ("num_blocks", True), ("max_batch_tokens", 0),
    ("max_memory_percent", 0), ("max_memory_percent", 1.5), ("max_memory_percent", float("nan")),
    ("max_requests_per_batch", 0), ("allow_block_sharing", 1), ("use_async_batching", "yes"),
    ("use_cuda_graph", (True,)), ("use_cuda_graph", (True, False)), ("return_logprobs", None), ("seed", 1.0),
    ("max_queue_size", -1), ("max_queue_size", None), ("per_request_processors", 2),
    ("drop_unsupported_processors", "no"),
    ("page_size", 2), ("kv_cache_dtype", "fp8_e5m2"), ("kv_cache_dtype", None),
])  # fmt: skip
def test_a_bad_value_names_itself(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        ContinuousBatchingConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [
    ("max_blocks_per_request", 0), ("max_blocks_per_request", 32), ("q_padding_interval_size", 64),
    ("kv_padding_interval_size", 16384), ("varlen_compile_config", {}), ("decode_compile_config", object()),
    ("default_compile_level", 1), ("default_compile_level", False), ("scheduler_type", "prefill_first"),
    ("disable_nccl_graph_mixing", False), ("cpu_group_timeout", None), ("use_default_compile_configs", True),
    ("max_cached_graphs", 8),
])  # fmt: skip
def test_what_has_no_use_here_is_refused_with_the_reason(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=rf"{name}=.*Leave it out: \w+"):
        ContinuousBatchingConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), [
    ("cpu_offload_space", 0), ("cpu_offload_space", 0.5), ("cpu_offload_space_safety_threshold", 0.5),
    ("cpu_group_timeout", 300), ("use_default_compile_configs", False),
    ("max_memory_percent", 1), ("safety_margin", 0), ("use_cuda_graph", (False, False)), ("seed", -3),
    ("kv_cache_dtype", "fp8"), ("per_request_processors", True), ("drop_unsupported_processors", False),
])  # fmt: skip
def test_the_rest_is_taken(name: str, value: object) -> None:
    assert getattr(ContinuousBatchingConfig(**{name: value}), name) == value


def test_setting_checks_too() -> None:
    config = ContinuousBatchingConfig()
    config.num_blocks = 7
    with pytest.raises(ValueError, match=r"num_block'.*Did you mean num_blocks"):
        config.num_block = 7  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="num_blocks"):
        config.num_blocks = 0
    assert config.num_blocks == 7


def test_a_block_is_the_unit_of_the_cache() -> None:
    assert ContinuousBatchingConfig(num_blocks=5).cache_tokens == 5 * 256
    assert ContinuousBatchingConfig(num_blocks=5, page_size=32).cache_tokens == 5 * 32
    assert ContinuousBatchingConfig(page_size=32).block_size == 32
    assert ContinuousBatchingConfig().cache_tokens is None


@pytest.mark.parametrize(("given", "both"), [(None, None), (True, True), ((False, False), False)])
def test_one_choice_for_both_kinds_of_steps(given: object, both: object) -> None:
    assert ContinuousBatchingConfig(use_cuda_graph=given).use_graphs == both


def test_no_torch() -> None:
    code = "import sys; from cuformers.generation import ContinuousBatchingConfig; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_it_is_where_transformers_has_it() -> None:
    from cuformers import ContinuousBatchingConfig as at_the_root
    from cuformers.generation import ContinuousBatchingConfig as in_generation

    assert at_the_root is in_generation is ContinuousBatchingConfig
