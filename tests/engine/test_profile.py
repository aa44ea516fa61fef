"""The step that measures memory: it runs over one page, and leaves nothing behind."""

import pytest
import torch
from models.checkpoints import shared

from cuformers.cuda import memory
from cuformers.engine import profile
from cuformers.engine.capacity import Capacity
from cuformers.nn.cache import layout

CAPACITY = Capacity(rows=3, length=128, pages=1000, eos=4)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_it_runs_the_largest_step(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, made to look like a GPU: all tokens and all rows are in one step."""
    model, steps = shared(name), []
    step = profile.Runner.step

    def watched(self: profile.Runner, chunks: list, rows: int, mode: object) -> object:
        assert self.cache.num_pages == 1
        steps.append((sum(c.count for c in chunks), rows))
        return step(self, chunks, rows, mode)  # type: ignore[arg-type]

    monkeypatch.setattr(profile.Runner, "step", watched)
    groups = layout([spec.window for spec in model.model.attention_specs])
    assert profile.step_bytes(model, None, CAPACITY, groups, 300) == 0 and not steps
    runner = profile.Runner(
        model, None, Capacity(rows=3, length=128, pages=1, eos=4), groups, use_graphs=False, page_size=64
    )
    with torch.no_grad():
        runner.step(profile._pieces(CAPACITY, 300), 3, profile.Mode(sample=True))
    assert steps == [(300, 3)]


@pytest.mark.gpu
def test_it_says_what_a_step_takes() -> None:
    from cuformers.auto.causal_lm import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(shared("llama").config, dtype="bfloat16", device_map="cuda", seed=0)
    groups = layout([spec.window for spec in model.model.attention_specs])
    small = profile.step_bytes(model, None, CAPACITY, groups, 100)  # the model's rotary table grows to this length
    before = memory.allocated_bytes(model.device)
    large = profile.step_bytes(model, None, CAPACITY, groups, 380)
    logits = CAPACITY.rows * model.config.vocab_size * 2
    assert logits < small < large and memory.allocated_bytes(model.device) == before
