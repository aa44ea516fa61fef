"""The built-in model's workshop (tools/builtin): its text, its compact llama, its saved folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

TOOLS = Path(__file__).resolve().parents[1] / "tools" / "builtin"


@pytest.fixture(autouse=True)
def _tools_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOLS))
    torch.set_num_threads(1)


@pytest.fixture
def model():
    from llama import Llama, Shape

    torch.manual_seed(0)
    shape = Shape(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                  num_key_value_heads=2, head_dim=8, max_position_embeddings=64)  # fmt: skip
    made = Llama(shape)
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    return made.eval().requires_grad_(False)


def test_stories_have_no_open_slot_and_right_articles() -> None:
    import grammar

    texts = grammar.many(400, seed=7)
    assert texts == grammar.many(400, seed=7)
    assert len(set(texts)) == 400
    for text in texts:
        assert text.isascii()
        assert not re.search(r"[{}|?] ?$|[{}|]|  | \.|\ba [aeio]|\ban [^aeiouh]", text), text
        assert text.count('"') % 2 == 0, text


def test_step_over_the_cache_equals_forward_with_left_padding(model) -> None:
    from llama import Cache

    ids = torch.randint(1, 61, (2, 12))
    whole = model(ids)
    short = model(ids[1:, 5:])
    padded = ids.clone()
    padded[1, :5] = 0
    cache = Cache.empty(model.shape, 2, 16, model.model.norm.weight)
    start = torch.tensor([0, 5])
    first = model.step(padded[:, :9], torch.arange(9), start, cache)
    for slot in range(9, 12):
        last = model.step(padded[:, slot : slot + 1], torch.tensor([slot]), start, cache)
    torch.testing.assert_close(first[0], whole[0, 8], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last[0], whole[0, 11], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(last[1], short[0, 6], atol=1e-5, rtol=1e-5)


def test_sampler_with_one_choice_is_greedy(model) -> None:
    from sampler import Sampler, Sampling

    prompts = [[3, 4, 5], [6, 7, 8, 9, 10]]
    drawn = Sampler(model, 2, 8, 10, Sampling(top_k=1), graph=False)(prompts)
    for prompt, new in zip(prompts, drawn, strict=True):
        row = list(prompt)
        for _ in range(10):
            row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
        assert new == row[len(prompt) :]


def test_saved_folder_reads_back_in_transformers(model, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import corpus
    import grammar

    tokenizer = corpus.train_tokenizer(grammar.many(50), 300)
    model.save(tmp_path, {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1})
    corpus.save_tokenizer(tokenizer, tmp_path, 64)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = type(model).load(tmp_path, "cpu", torch.float32)
    ids = torch.randint(2, 61, (2, 20))
    torch.testing.assert_close(ours(ids), theirs(ids).logits, atol=2e-4, rtol=1e-4)
    text = "Once upon a time, \u00e9t\u00e9 \u65e5\u672c \U0001f600"
    again = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert again(text).input_ids == tokenizer.encode(text).ids
    assert again(text).input_ids[0] == 0
    assert again.decode(again(text).input_ids, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0"])
def test_dequantize_follows_the_block_formula(kind: str) -> None:
    import numpy as np
    import pack_teacher

    rng = np.random.default_rng(0)
    scale, least = np.float16(0.25), np.float16(-1.5)
    head = scale.tobytes() + (least.tobytes() if kind == "Q4_1" else b"")
    if kind == "Q4_1":
        codes = rng.integers(0, 16, 32)
        body = (codes[:16] | codes[16:] << 4).astype(np.uint8).tobytes()
        want = codes * 0.25 - 1.5
    else:
        codes = rng.integers(-128, 128, 32)
        body, want = codes.astype(np.int8).tobytes(), codes * 0.25
    raw = np.frombuffer(head + body, np.uint8)[None]
    np.testing.assert_array_equal(pack_teacher.dequantize(raw, kind), want[None].astype(np.float32))


def test_clean_tells_why() -> None:
    import clean
    import grammar

    story = grammar.many(1, seed=3)[0]
    assert clean.why_not(clean.tidy(story)) is None
    assert clean.tidy("\u201cHi,\u201d he said. And th") == '"Hi," he said.'
    assert clean.why_not(story + " **bold**.") == "markup"
    assert clean.why_not("Sure, here is a story. " + story) == "meta"
    assert clean.why_not("He ran to the big house. " * 12) == "loops"
    assert clean.common_only(["a b", "a b", "a c"], 2) == ["a b", "a b"]


def test_muon_turns_a_matrix_orthogonal() -> None:
    from muon import orthogonal

    torch.manual_seed(0)
    out = orthogonal(torch.randn(3, 8, 20))
    singular = torch.linalg.svdvals(out)
    assert singular.min() > 0.5  # the quintic's promise: about one, not exactly
    assert singular.max() < 1.3
