"""Every family's logits and gradients are transformers', within and past the model's length, padded or not."""

import copy

import pytest
import torch
from torch import Tensor

from models import state_space
from models.checkpoints import ALONE, WITHOUT_SDPA, load, oracle, shared, tokens
from models.families import FAMILIES

ATOL = 1e-4
SHORT, LONG = 20, 90  # the rows' max_position_embeddings is 64, their original lengths 16 to 32
CASES = [(name, "eager") for name in FAMILIES] + [(name, "sdpa") for name in FAMILIES if name not in WITHOUT_SDPA]


def same(ours: Tensor, theirs: Tensor, what: str) -> None:
    worst = (ours - theirs).abs().max().item()
    relative = worst / theirs.abs().max().item()
    print(f"{what}: max abs {worst:.1e}, relative {relative:.1e}")
    assert worst < ATOL, f"{what}: max abs {worst:.1e}, relative {relative:.1e}"


def padded(lengths: tuple[int, ...], side: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, mask, and positions as transformers' generate makes them."""
    width = max(lengths)
    mask = torch.tensor([[1] * n + [0] * (width - n) for n in lengths])
    mask = mask if side == "right" else mask.flip(1)
    ids = tokens(len(lengths), width, seed=seed) * mask
    return ids, mask, (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)


@torch.no_grad()
def reference(name: str, ids: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
    """Transformers' logits; row by row where its batches mix the rows' lengths up. Zeros where padding stood."""
    model = oracle(name)
    if name not in ALONE:
        return model(ids, attention_mask=mask, position_ids=positions).logits * mask[..., None]
    out = torch.zeros(*ids.shape, model.config.vocab_size)
    for i in range(len(ids)):
        real = mask[i].bool()
        out[i, real] = model(ids[i][real][None], position_ids=positions[i][real][None]).logits[0]
    return out


@pytest.mark.parametrize("length", [SHORT, LONG])
@pytest.mark.parametrize("name, backend", CASES)
def test_logits_of_a_rectangle(name: str, backend: str, length: int) -> None:
    model, ids = load(name, attn_implementation=backend), tokens(2, length)
    with torch.no_grad():
        theirs = oracle(name)(ids).logits
        same(model(ids).logits, theirs, f"{name} {backend} {length}")


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name, backend", CASES)
def test_logits_of_a_padded_batch(name: str, backend: str, side: str) -> None:
    model = load(name, attn_implementation=backend)
    ids, mask, positions = padded((1, LONG, SHORT), side)
    theirs = reference(name, ids, mask, positions)
    with torch.no_grad():
        same(model(ids, attention_mask=mask).logits, theirs, f"{name} {backend} {side}")
        same(model(ids, attention_mask=mask, position_ids=positions).logits, theirs, f"{name} {backend} {side} given")


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients(name: str) -> None:
    theirs, model = copy.deepcopy(oracle(name)).train(), load(name).train()
    ids, mask, positions = padded((17, 25), "right", seed=1)
    labels = ids.masked_fill(mask == 0, -100)
    loss = theirs(ids, attention_mask=mask, position_ids=positions, labels=labels).loss
    mine = model(ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(mine, loss, rtol=1e-6, atol=0)
    (loss + mine).backward()
    expected = {n: p.grad for n, p in theirs.named_parameters()}
    found = {n: p.grad for n, p in model.named_parameters()}
    assert expected.keys() == found.keys()
    for parameter, grad in expected.items():
        error = (found[parameter] - grad).norm() / grad.norm()
        assert error < 1e-3, f"{name} {parameter}: relative error {error:.1e} of a gradient of norm {grad.norm():.1e}"


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2", "phi3-longrope"])
def test_a_row_does_not_depend_on_its_batch_mates(name: str) -> None:
    model = shared(name)
    ids, mask, _ = padded((30, 50, 7), "right", seed=2)
    with torch.no_grad():
        together = model(ids, attention_mask=mask).logits
        for i, n in enumerate(mask.sum(1).tolist()):
            torch.testing.assert_close(together[i, :n], model(ids[i : i + 1, :n]).logits[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("start", [5, 60])
def test_positions_that_do_not_begin_at_zero(backend: str, start: int) -> None:
    ids, positions = tokens(2, 12), torch.arange(start, start + 12)[None]
    model = load("llama3", attn_implementation=backend)
    with torch.no_grad():
        theirs = oracle("llama3")(ids, position_ids=positions).logits
        same(model(ids, position_ids=positions).logits, theirs, f"{backend} from {start}")


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "qwen3-tied"])
def test_bfloat16_is_as_near_to_float32_as_transformers_is(name: str) -> None:
    """Rounding differs, as norms and rotations are rounded once here; the error must not be larger."""
    ids = tokens(2, 40)
    with torch.no_grad():
        exact = oracle(name)(ids).logits
        theirs = (copy.deepcopy(oracle(name)).bfloat16()(ids).logits.float() - exact).norm() / exact.norm()
        mine = (load(name, dtype="bfloat16")(ids).logits.float() - exact).norm() / exact.norm()
    assert mine < 1.25 * theirs, f"{mine:.3f} against {theirs:.3f}"


def test_every_architecture_has_a_row() -> None:
    from cuformers.models.registry import specs

    tested = {oracle(name).config.model_type for name in FAMILIES}
    tested |= {state_space.oracle(name).config.model_type for name in state_space.STATE_SPACE}
    decoders = {name for name, spec in specs().items() if spec.decoder is not None}
    assert decoders <= tested, f"without a parity row: {sorted(decoders - tested)}"
