"""Leaves that lie in a row are used as one weight, which is never stale; everything else is called leaf by leaf."""

import copy
from collections.abc import Callable

import pytest
import torch
from models.checkpoints import load, tokens
from torch import Tensor, nn

from cuformers.kernels.table import reference
from cuformers.nn.norm import RMSNorm
from cuformers.nn.project import fused, project, rows_as_one
from cuformers.nn.rows import lay_in_rows

ROWS, WIDTH = (6, 4, 2), 8


def leaves(bias: bool = False) -> list[nn.Linear]:
    """Leaves that lie in a row."""
    torch.manual_seed(0)
    made = [nn.Linear(WIDTH, n, bias=bias).requires_grad_(False) for n in ROWS]
    for kind in ("weight", "bias") if bias else ("weight",):
        whole = torch.cat([getattr(leaf, kind) for leaf in made])
        for leaf, part in zip(made, whole.split(ROWS)):
            setattr(leaf, kind, nn.Parameter(part, requires_grad=False))
    return made


def separate(x: Tensor, some: list) -> Tensor:
    return torch.cat([leaf(x) for leaf in some], dim=-1)


@pytest.mark.parametrize("bias", [False, True])
def test_one_view_of_all(bias: bool) -> None:
    some, x = leaves(bias), torch.randn(5, WIDTH)
    one = fused(some)
    assert one is not None
    weight, whole_bias = one
    assert weight.data_ptr() == some[0].weight.data_ptr() and weight.shape == (12, WIDTH)
    assert (whole_bias is None) == (not bias)
    torch.testing.assert_close(project(reference(), x, some), separate(x, some))
    with torch.no_grad():
        some[1].weight.mul_(3)  # in place: the view sees it
    torch.testing.assert_close(project(reference(), x, some), separate(x, some))


def test_norm_scale_and_residual() -> None:
    some, x, residual = leaves(True), torch.randn(5, WIDTH), torch.randn(5, 12)
    norm = RMSNorm(WIDTH, 1e-5, offset=1.0)
    nn.init.normal_(norm.weight)
    found = project(reference(), x, some, norm=norm, residual=residual, scale=0.3)
    h = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * (1 + norm.weight)
    expected = residual + 0.3 * separate(h, some)
    torch.testing.assert_close(found, expected)
    some[0].register_forward_hook(lambda *_: None)  # leaf by leaf now
    torch.testing.assert_close(project(reference(), x, some, norm=norm, residual=residual, scale=0.3), expected)


def _replace(some: list, module: nn.Module) -> None:
    some[1] = module


class Adapter(nn.Module):
    """The shape of a LoRA layer."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.up = base, nn.Linear(WIDTH, base.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(x)


class Negative(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return -super().forward(input)


def _patch(leaf: nn.Linear) -> None:
    original = leaf.forward
    leaf.forward = lambda x: original(x) + 1  # type: ignore[method-assign]


CHANGES: dict[str, Callable[[list], object]] = {
    "a replaced parameter": lambda s: setattr(s[1], "weight", nn.Parameter(torch.randn(4, WIDTH))),
    "data of its own": lambda s: setattr(s[2].weight, "data", s[2].weight.data.clone()),
    "an adapter": lambda s: _replace(s, Adapter(s[1])),
    "a subclass": lambda s: _replace(s, Negative(WIDTH, 4)),
    "a forward hook": lambda s: s[0].register_forward_hook(lambda m, a, out: out * 2),
    "a pre-hook": lambda s: s[0].register_forward_pre_hook(lambda m, a: (a[0] + 1,)),
    "a patched forward": lambda s: _patch(s[2]),
    "a bias on one": lambda s: setattr(s[0], "bias", nn.Parameter(torch.randn(6))),
    "another order": lambda s: s.reverse(),
    "another dtype": lambda s: s[1].double().float(),
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_changes_are_seen_at_once(change: str) -> None:
    some, x = leaves(), torch.randn(5, WIDTH)
    before = project(reference(), x, some)
    CHANGES[change](some)
    assert fused(some) is None
    torch.testing.assert_close(project(reference(), x, some), separate(x, some))
    same = change in ("data of its own", "another dtype")
    assert same == torch.allclose(project(reference(), x, some), before, atol=1e-5)


def test_leaves_that_ask_for_gradients_get_them() -> None:
    some, x = [leaf.requires_grad_() for leaf in leaves()], torch.randn(5, WIDTH, requires_grad=True)
    twins = copy.deepcopy(some)
    y = torch.randn(5, 12)
    (project(reference(), x, some) * y).sum().backward()
    grad = x.grad
    x.grad = None
    (separate(x, twins) * y).sum().backward()
    torch.testing.assert_close(grad, x.grad)
    for leaf, twin in zip(some, twins):
        torch.testing.assert_close(leaf.weight.grad, twin.weight.grad)
    with torch.no_grad():
        assert fused(some) is not None


def test_gradients_flow_through_frozen_leaves() -> None:
    some, x = leaves(), torch.randn(5, WIDTH, requires_grad=True)
    assert fused(some) is not None
    (grad,) = torch.autograd.grad(project(reference(), x, some).sum(), x)
    torch.testing.assert_close(grad, torch.cat([leaf.weight for leaf in some]).sum(0).expand(5, -1))


def test_a_hook_on_a_single_leaf_runs_too() -> None:
    (leaf, *_), seen = leaves(), []
    leaf.register_full_backward_hook(lambda *_: seen.append(1))
    x = torch.randn(5, WIDTH, requires_grad=True)
    project(reference(), x, [leaf]).sum().backward()
    assert seen




def groups(model: nn.Module) -> list[bool]:
    """For each layer whether q, k, v and gate, up are used as one."""
    with torch.no_grad():
        return [fused(m.leaves) is not None for layer in model.model.layers for m in (layer.self_attn, layer.mlp)]


@pytest.mark.parametrize("name", ["llama", "qwen2", "olmo2", "phi3"])
@pytest.mark.parametrize("what", ["loaded", "to", "load_state_dict", "assign", "train", "copy"])
@torch.no_grad()
def test_a_model_lies_in_rows_and_computes_the_same(name: str, what: str) -> None:
    model = load(name)
    expected = model(tokens(1, 9)).logits
    if what == "to":
        model.to(torch.bfloat16).to(torch.float32)
        expected = None
    elif what == "load_state_dict":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()})
    elif what == "assign":
        model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)
    elif what == "train":
        model.train().eval()
    elif what == "copy":
        model = copy.deepcopy(model)
    if what in ("assign", "copy") and name != "phi3":  # tensors of their own: right at once, in rows again when asked
        assert not any(groups(model))
        torch.testing.assert_close(model(tokens(1, 9)).logits, expected, rtol=1e-5, atol=1e-5)
        lay_in_rows(model)
    assert all(groups(model))
    if expected is not None:
        torch.testing.assert_close(model(tokens(1, 9)).logits, expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_model_with_an_adapter_moves_and_counts_it() -> None:
    model = load("qwen2")
    before = model(tokens(1, 9)).logits
    attn = model.model.layers[1].self_attn

    class Wider(Adapter):
        def __init__(self, base: nn.Linear) -> None:
            nn.Module.__init__(self)
            self.base, self.up = base, nn.Linear(base.in_features, base.out_features)

    attn.q_proj = Wider(attn.q_proj)
    changed = model(tokens(1, 9)).logits
    assert not torch.allclose(changed, before, atol=1e-2)
    nn.init.zeros_(attn.q_proj.up.weight)
    nn.init.zeros_(attn.q_proj.up.bias)
    model.to(torch.float16).to(torch.float32)
    assert groups(model)[2] is False and sum(groups(model)) == len(groups(model)) - 1
    torch.testing.assert_close(model(tokens(1, 9)).logits, before, rtol=0.05, atol=0.1)


def test_rows_of_nothing_in_common() -> None:
    a, b = torch.zeros(2, 3), torch.zeros(2, 3)
    assert rows_as_one([a, b]) is None
    assert rows_as_one([a]) is a
    whole = torch.arange(12.0).view(4, 3)
    one = rows_as_one([whole[:2], whole[2:]])
    assert one is not None and torch.equal(one, whole)
    assert rows_as_one([whole[2:], whole[:2]]) is None
    assert rows_as_one([whole[:2], whole[3:]]) is None
    assert rows_as_one([whole[:, :1], whole[:, 1:2]]) is None
