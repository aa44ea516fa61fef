"""model(...): losses, masks with holes, what is kept of the logits, and kernels that suit what is asked."""

from dataclasses import replace

import pytest
import torch
from models.checkpoints import load, oracle, shared, tokens
from torch import Tensor

from cuformers.kernels.guard import guarded
from cuformers.kernels.table import reference
from cuformers.nn.kernel_module import set_kernels

NAME = "llama"


@torch.no_grad()
def test_holes_in_a_mask_are_tokens_that_are_not_there() -> None:
    ids, mask = tokens(1, 9), torch.tensor([[0, 1, 1, 0, 0, 1, 1, 1, 0]])
    out = shared(NAME)(ids, attention_mask=mask).logits
    positions = torch.arange(9)[mask[0].bool()][None] - 1
    alone = oracle(NAME)(ids[mask.bool()][None], position_ids=positions).logits
    torch.testing.assert_close(out[mask.bool()], alone[0], rtol=1e-5, atol=1e-4)
    assert (out[~mask.bool()] == 0).all()


@pytest.mark.parametrize("backend", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@torch.no_grad()
def test_a_row_without_any_token_is_finite(backend: str, dtype: str) -> None:
    model = load(NAME, attn_implementation=backend, dtype=dtype)
    ids, mask = tokens(3, 7), torch.ones(3, 7)
    mask[1] = 0
    out = model(ids, attention_mask=mask).logits
    assert out.isfinite().all() and (out[1] == 0).all()
    torch.testing.assert_close(out[[0, 2]], model(ids[[0, 2]]).logits, rtol=1e-2, atol=1e-2)


@torch.no_grad()
def test_last_logits_only() -> None:
    ids, mask = tokens(2, 9), torch.tensor([[0] * 4 + [1] * 5, [1] * 9])
    whole = shared(NAME)(ids, attention_mask=mask).logits
    for keep in (1, 3, 9, 20):
        kept = shared(NAME)(ids, attention_mask=mask, logits_to_keep=keep).logits
        torch.testing.assert_close(kept, whole[:, -keep:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("num_items", [None, 7, torch.tensor(30)])
def test_losses(num_items: int | Tensor | None) -> None:
    ids = tokens(3, 9)
    labels = ids.clone()
    labels[0, :5] = labels[2, 6:] = -100
    options = {} if num_items is None else {"num_items_in_batch": num_items}
    expected = oracle(NAME)(ids, labels=labels, **options).loss
    for dtype in ("float32", "bfloat16"):
        loss = load(NAME, dtype=dtype)(ids, labels=labels, **options).loss
        assert loss.dtype is torch.float32
        torch.testing.assert_close(loss, expected, rtol=1e-5 if dtype == "float32" else 0.05, atol=0)


@pytest.mark.parametrize("name", [NAME, "gemma2", "granite", "qwen3-tied"])
@pytest.mark.parametrize("num_items", [None, torch.tensor(30)])
def test_training_computes_the_loss_without_the_logits(name: str, num_items: Tensor | None) -> None:
    """Value and gradients are those of the logits' loss, in padded batches too; eval mode does as it is told."""
    ids, mask = tokens(3, 9), torch.ones(3, 9)
    mask[0, :4] = mask[2, 6:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    given = {"attention_mask": mask, "labels": labels, "num_items_in_batch": num_items}
    model, found = load(name).train(), []
    for skip in (None, False):
        out = model(ids, skip_logits=skip, **given)
        assert (out.logits is None) == (skip is None)
        out.loss.backward()
        found.append((out.loss.detach(), {n: p.grad for n, p in model.named_parameters()}))
        model.zero_grad()
    torch.testing.assert_close(found[0], found[1], rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        quiet = model.eval()(ids, skip_logits=True, **given)
        assert quiet.logits is None and torch.allclose(quiet.loss, found[0][0], rtol=1e-5)
        assert model(ids, **given).logits is not None


def test_a_head_that_is_more_than_its_weight_is_called() -> None:
    ids, model = tokens(2, 9), load(NAME).train()
    plain = model(ids, labels=ids).loss
    model.lm_head.register_forward_hook(lambda m, a, out: out * 0.5)
    hooked = model(ids, labels=ids)
    assert hooked.logits is None and (hooked.loss - plain).abs() > 1e-3
    torch.testing.assert_close(hooked.loss, model(ids, labels=ids, skip_logits=False).loss)


def test_a_batch_in_which_nothing_counts_trains_nothing() -> None:
    ids, model = tokens(2, 9), load(NAME).train()
    loss = model(ids, labels=torch.full_like(ids, -100)).loss
    assert loss.isnan()
    loss.backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_padding_predicts_nothing() -> None:
    """Labels that were not blanked out there: the loss is that of the rows without padding."""
    ids, mask = tokens(2, 9), torch.ones(2, 9)
    mask[0, :4] = mask[1, 6:] = 0
    blank = ids.clone()
    blank[0, :5] = -100  # the first real token is nobody's next
    blank[1, 7:] = -100
    for model in (load(NAME), load(NAME).train()):
        mine, right = (model(ids, attention_mask=mask, labels=labels).loss for labels in (ids, blank))
        torch.testing.assert_close(mine, right)


def test_the_output_reads_as_in_transformers() -> None:
    ids = tokens(1, 5)
    with torch.no_grad():
        out = shared(NAME)(ids, labels=ids, attention_mask=torch.ones_like(ids))
        loss, logits = shared(NAME)(ids, labels=ids, return_dict=False)
    assert out.past_key_values is None and list(out) == ["loss", "logits"]
    assert torch.equal(out[0], out["loss"]) and torch.equal(out.loss, loss) and torch.equal(out[1], logits)


@pytest.mark.parametrize("options, error, says", [
    ({"use_cache": True}, ValueError, "use_cache=True.*use generate"),
    ({"output_attentions": True}, TypeError, "output_attentions"),
    ({"inputs_embeds": torch.zeros(1, 4, 64)}, TypeError, "inputs_embeds"),
    ({"attention_mask": torch.ones(1, 5)}, ValueError, "attention_mask"),
    ({"position_ids": torch.tensor([[-1, 0, 1, 2]])}, ValueError, "got -1"),
    ({"position_ids": torch.zeros(3, 1, 4, dtype=torch.long)}, ValueError, "position_ids"),
    ({"logits_to_keep": -1}, ValueError, "logits_to_keep=-1"),
    ({"labels": tokens(1, 3)}, ValueError, r"labels must have input_ids' shape.*\(1, 3\)"),
    ({"labels": tokens(1, 4), "logits_to_keep": 2}, ValueError, "logits_to_keep=0"),
    ({"labels": tokens(1, 4) + 100_000}, ValueError, r"labels=100\d+ is not possible.*tokens from 0 to"),
    ({"skip_logits": True}, ValueError, "skip_logits=True is not possible.*without labels"),
])  # fmt: skip
def test_what_is_refused(options: dict, error: type, says: str) -> None:
    with pytest.raises(error, match=says):
        shared(NAME)(tokens(1, 4), **options)


def test_dropout_is_refused_rather_than_ignored() -> None:
    with pytest.raises(ValueError, match=r"resid_pdrop=0\.1"):
        load(NAME, resid_pdrop=0.1)
    model = load(NAME, attention_dropout=0.1)
    assert model.generate(tokens(1, 4), max_new_tokens=2).shape == (1, 6)
    with pytest.raises(ValueError, match=r"attention_dropout=0.1.*set to 0.0"):
        model.train()
    model.config.attention_dropout = 0.0
    assert model.train().training


def test_hooks_on_the_embedding_run() -> None:
    """Training of adapters makes the embedding's output ask for gradients this way."""
    model = load(NAME).requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda m, a, out: out.requires_grad_())
    assert model(tokens(1, 4)).logits.requires_grad


def test_a_forward_that_may_be_differentiated_uses_kernels_with_a_backward() -> None:
    """Inference kernels would drop gradients in silence where a model in eval mode is differentiated."""

    def infer_only(*args: object, **kwargs: object) -> None:
        raise AssertionError("this kernel has no backward")

    plain = reference()
    names = [choice.op for choice in plain.choices]
    model = load(NAME)
    set_kernels(model, replace(plain, **{name: guarded(infer_only, getattr(plain, name)) for name in names}))
    model(tokens(1, 4), labels=tokens(1, 4)).loss.backward()
    assert all(p.grad is not None for p in model.parameters())
    with torch.no_grad(), pytest.raises(AssertionError, match="no backward"):
        model(tokens(1, 4))
