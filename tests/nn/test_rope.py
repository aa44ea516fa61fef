"""Rotary tables are those of transformers for every scaling; growing them changes nothing that was there."""

import weakref
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.rope import RopeSpec, Rotary, attention_factor, frequency_sets
from cuformers.nn.step import full_step

DIM, LIMIT, THETA = 32, 256, 10_000.0
CPU = torch.device("cpu")
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 3.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-own-attention": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.7},
    "yarn-betas": {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 20.0, "beta_slow": 2.0},
    "yarn-mscale": {"factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn-not-truncated": {"factor": 4.0, "original_max_position_embeddings": 64, "truncate": False},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0 + 0.05 * i for i in range(DIM // 2)],
        "long_factor": [1.0 + 0.9 * i for i in range(DIM // 2)],
        "original_max_position_embeddings": 64,
    },
    "longrope-own-attention": {
        "short_factor": [1.0] * (DIM // 2),
        "long_factor": [2.0] * (DIM // 2),
        "original_max_position_embeddings": 64,
        "attention_factor": 1.19,
    },
}


def pair(name: str) -> tuple[RopeSpec, Any, Any]:
    """Our spec, transformers' configuration and its function."""
    kind, options = name.split("-")[0], SCALINGS[name]
    spec = RopeSpec(
        dim=DIM, rope_theta=THETA, rope_type=kind, max_position_embeddings=LIMIT,
        **{k: tuple(v) if isinstance(v, list) else v for k, v in options.items()},
    )  # fmt: skip
    config = transformers.LlamaConfig(
        hidden_size=4 * DIM, num_attention_heads=4, max_position_embeddings=LIMIT,
        rope_parameters={"rope_type": kind, "rope_theta": THETA, **options},
    )  # fmt: skip
    return spec, config, ROPE_INIT_FUNCTIONS.get(kind)


def theirs(name: str, length: int) -> tuple[torch.Tensor, float]:
    _, config, function = pair(name)
    if function is None:  # "default" lives in the model files
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        return LlamaRotaryEmbedding.compute_default_rope_parameters(config, CPU)
    return function(config, CPU, seq_len=length)


@pytest.mark.parametrize("length", [40, LIMIT, 300, 1000])
@pytest.mark.parametrize("name", SCALINGS)
def test_cos_and_sin_of_a_sequence(name: str, length: int) -> None:
    frequencies, factor = theirs(name, length)
    angles = torch.arange(length).float()[:, None] * frequencies
    rotary = Rotary(pair(name)[0])
    found = rotary.rows(full_step(torch.arange(length), (length,), EagerAttention()))
    rows = found.rows.long()
    torch.testing.assert_close(found.cos[rows], angles.cos() * factor, rtol=0, atol=2e-4)
    torch.testing.assert_close(found.sin[rows], angles.sin() * factor, rtol=0, atol=2e-4)


@pytest.mark.parametrize("name", [n for n in SCALINGS if not n.startswith("dynamic")])
def test_frequencies_and_attention_factor(name: str) -> None:
    spec = pair(name)[0]
    sets = frequency_sets(spec)
    for index, length in enumerate([40, 1000][: len(sets)]):
        frequencies, factor = theirs(name, length)
        torch.testing.assert_close(sets[index], frequencies, rtol=1e-6, atol=0)
        assert attention_factor(spec) == pytest.approx(factor, rel=1e-6)
    assert len(sets) == (2 if spec.rope_type == "longrope" else 1)


@pytest.mark.parametrize("name", ["llama3", "longrope", "dynamic"])
def test_sequences_of_a_stream_go_by_their_own_length(name: str) -> None:
    rotary, lengths = Rotary(pair(name)[0]), (30, 300, 70)
    positions = torch.cat([torch.arange(n) for n in lengths])
    together = rotary.rows(full_step(positions, lengths, EagerAttention()))
    cos = together.cos[together.rows.long()].split(lengths)
    for part, n in zip(cos, lengths):
        alone = rotary.rows(full_step(torch.arange(n), (n,), EagerAttention()))
        assert torch.equal(part, alone.cos[alone.rows.long()])


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_positions_that_do_not_begin_at_zero_have_their_place_in_a_longer_text(name: str) -> None:
    rotary = Rotary(pair(name)[0])
    rotary.reserve(400, CPU)
    whole = rotary.rows(full_step(torch.arange(400), (400,), EagerAttention()))
    last = rotary.rows(full_step(torch.arange(390, 400), (10,), EagerAttention()))
    assert torch.equal(last.cos[last.rows.long()], whole.cos[whole.rows.long()][390:])


def test_tables_grow_and_the_outgrown_one_stays_for_captured_graphs() -> None:
    rotary = Rotary(pair("default")[0])
    small = rotary.rows(full_step(torch.arange(9), (9,), EagerAttention()))
    kept, before = weakref.ref(small.cos), small.cos.clone()
    del small
    large = rotary.rows(full_step(torch.arange(5000), (5000,), EagerAttention()))
    assert large.cos.shape[0] == 8192 and torch.equal(large.cos[:1024], before)
    assert kept() is not None
    assert rotary.rows(full_step(torch.arange(9), (9,), EagerAttention())).cos is large.cos
    assert not list(rotary.state_dict())


@pytest.mark.parametrize("options, says", [
    ({"rope_type": "spiral"}, "rope_type='spiral'"),
    ({"dim": 7}, "rotary dimensions=7"),
    ({"dim": 0}, "rotary dimensions=0"),
    ({"rope_type": "linear"}, "factor'.=None"),
    ({"rope_type": "yarn"}, "factor'.=None"),
    ({"rope_type": "longrope", "short_factor": (1.0,), "long_factor": (1.0,)}, r"len\(short_factor\)=1"),
    ({"rope_theta": 0.0}, "rope_theta'.=0.0"),
    ({"factor": True}, "factor'.=True"),
])  # fmt: skip
def test_what_is_no_rotary_embedding(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        RopeSpec(**{"dim": 8, "rope_theta": THETA, **options})
