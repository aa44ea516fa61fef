"""`cuformers bench serve-offline`: its figures on a tiny work, and the floor counted key by key."""

import json

import pytest
import torch

from cuformers.auto.causal_lm import AutoModelForCausalLM
from cuformers.auto.config import AutoConfig
from cuformers.cli import main, offline_works
from cuformers.cli.offline_works import WORKS, Work, floor_seconds
from cuformers.cuda import rates
from cuformers.cuda.rates import Rates
from tests.models.families import COMMON
from tests.paths import DATA

torch.set_num_threads(1)

TINY = Work(prompts=[[5, 6, 7], [8] * 20, [9]], new_tokens=[4, 1, 7])
SLOW = Rates(bytes_per_second=1e6, flops=1e7)


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Works of no time, and rates that need no measuring."""
    monkeypatch.setattr(offline_works, "WORKS", {"even": lambda *_: TINY, "mixed": lambda *_: TINY})
    monkeypatch.setattr(rates, "measure", lambda *_: SLOW)


def test_figures_of_the_built_in_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "serve-offline", "--works", "mixed", "even", "--json", "--device", "cpu"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["rates"] == SLOW._asdict() and [work["work"] for work in found["works"]] == ["mixed", "even"]
    for figures in found["works"]:
        assert (figures["requests"], figures["prompt_tokens"], figures["new_tokens"]) == (3, 24, 12)
        assert figures["new_tokens_per_second"] == pytest.approx(12 / figures["seconds"])
        assert figures["fraction_of_floor"] == pytest.approx(figures["floor_seconds"] / figures["seconds"])


def test_a_table_for_the_eye_and_weights_that_are_not_read(capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(DATA / "checkpoints" / "stories260k")
    words = [folder, "--random-weights", "--works", "mixed", "--device", "cpu", "--dtype", "float32"]
    assert main.main(["bench", "serve-offline", *words]) == 0
    shown = capsys.readouterr().out
    assert "new tokens per second" in shown and "fraction of floor" in shown and "measured" in shown


def test_a_work_that_does_not_come_to_its_end_has_no_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(offline_works.WORKS, "even", lambda *_: Work(prompts=[[5], [10**6]], new_tokens=[2, 3]))
    assert main.main(["bench", "serve-offline", "--works", "even", "--device", "cpu"]) == main.USAGE_ERROR
    assert "gave 0 of 3: input_ids=1000000" in capsys.readouterr().err
    assert main.main(["bench", "serve-offline", "--requests", "0", "--device", "cpu"]) == main.USAGE_ERROR
    assert "--requests=0" in capsys.readouterr().err


def test_works_fit_the_vocabulary_and_come_again() -> None:
    for name, make in WORKS.items():
        work = make(5, 300)
        assert work == make(5, 300) and len(work.prompts) == len(work.new_tokens) == 5
        assert all(100 <= n <= 1024 for n in (*map(len, work.prompts), *work.new_tokens))
        assert max(map(max, work.prompts)) == 299, name
    assert {*map(len, WORKS["even"](3).prompts), *WORKS["even"](3).new_tokens} == {1024}
    assert max(map(max, WORKS["mixed"](200).prompts)) == offline_works.LARGEST_TOKEN


def test_the_floor_counts_each_key_and_weight() -> None:
    sizes = {**COMMON, "head_dim": 32, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gemma3_text", **sizes), dtype="bfloat16", device_map="cpu", seed=0
    )
    layers = sum(p.numel() for p in model.model.layers.parameters())
    head, size, heads, kv_heads, dim = COMMON["vocab_size"] * COMMON["hidden_size"], 2, 4, 2, 32
    key_bytes = attention = products = 0
    for prompt, new in zip(map(len, TINY.prompts), TINY.new_tokens):
        for window in (8, 10**9, 8, 10**9):
            attention += sum(2 * 2 * heads * dim * min(query + 1, window) for query in range(prompt))
            seen = [min(query + 1, window) for query in range(prompt, prompt + new - 1)]
            key_bytes += 2 * kv_heads * dim * size * sum(seen)
        products += 2 * layers * prompt
    decodes, steps = sum(new - 1 for new in TINY.new_tokens), max(TINY.new_tokens) - 1
    for limits in (SLOW, Rates(bytes_per_second=1e9, flops=1e5)):  # bound by bytes, then by arithmetic
        arithmetic = 2 * (decodes * layers + sum(TINY.new_tokens) * head) / limits.flops
        streamed = steps * (layers + head) * size / limits.bytes_per_second
        want = max(arithmetic, streamed) + key_bytes / limits.bytes_per_second + (products + attention) / limits.flops
        assert floor_seconds(model, TINY, limits) == pytest.approx(want, rel=1e-12)
        assert (streamed > arithmetic) == (limits is SLOW)


def test_of_experts_the_floor_counts_those_that_are_chosen() -> None:
    sizes = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("qwen3_moe", **COMMON, **sizes), dtype="bfloat16", device_map="cpu", seed=0
    )
    layers = sum(p.numel() for p in model.model.layers.parameters())
    experts = COMMON["num_hidden_layers"] * 6 * 3 * COMMON["hidden_size"] * 24
    head = COMMON["vocab_size"] * COMMON["hidden_size"]
    one, two = (Work(prompts=[[5]] * rows, new_tokens=[2] * rows) for rows in (1, 2))
    streams = Rates(bytes_per_second=1.0, flops=1e30)
    keys = COMMON["num_hidden_layers"] * 2 * 2 * 16 * 2 * 2  # of two positions, read by one step
    assert floor_seconds(model, one, streams) == pytest.approx(2 * (layers - experts / 2 + head) + keys)
    assert floor_seconds(model, two, streams) == pytest.approx(2 * (layers - experts / 4 + head) + 2 * keys)
    computes = floor_seconds(model, one, Rates(bytes_per_second=1e30, flops=1.0))
    attention = COMMON["num_hidden_layers"] * 4 * 4 * 16
    assert computes == pytest.approx(2 * 2 * (layers - experts / 2) + 2 * 2 * head + attention)
