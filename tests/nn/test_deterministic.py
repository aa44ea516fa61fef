"""Deterministic mode: when it is refused, and what it is made of; numbers in a process of its own, bits on a GPU."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models.checkpoints import load
from torch import Tensor, nn

from cuformers.kernels.table import reference
from cuformers.nn import project
from cuformers.nn.attention.backend import AttentionProblem
from cuformers.nn.attention.deterministic import deterministic_backend
from cuformers.nn.attention.over_pages import PAGE, lay_in_pages, pages
from cuformers.nn.project import one_map

CPU = torch.device("cpu")
OPS = replace(reference(), deterministic=True)


def leaves(bias: tuple[bool, ...] = (True, True, True)) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, n, bias=b) for n, b in zip((6, 4, 2), bias, strict=True)]


def in_a_row(some: list[nn.Linear]) -> list[nn.Linear]:
    for kind in ("weight", "bias"):
        parameters = [getattr(leaf, kind) for leaf in some]
        if all(p is not None for p in parameters):
            for parameter, part in zip(parameters, torch.cat([p.detach() for p in parameters]).split([6, 4, 2])):
                parameter.data = part
    return some


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("bias", [(True, True, True), (True, False, True)])
def test_one_weight_of_leaves_that_are_trained(
    bias: tuple[bool, ...], together: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(project, "notice", lambda text, once: said.append(text))
    some = in_a_row(leaves(bias)) if together else leaves(bias)
    one = one_map(OPS, some)
    assert one is not None and one[1] is not None
    assert (one[0].data_ptr() == some[0].weight.data_ptr()) == together == (not said)
    x = torch.randn(5, 8)
    expected = torch.cat([leaf(x) for leaf in some], dim=1)
    found = x @ one[0].T + one[1]
    torch.testing.assert_close(found, expected)
    parameters = [p for leaf in some for p in leaf.parameters()]
    y = torch.randn(5, 12)
    for a, b in zip(*(torch.autograd.grad((r * y).sum(), parameters) for r in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_only_trained_leaves_get_gradients() -> None:
    some = in_a_row(leaves((False,) * 3))
    some[1].weight.requires_grad_(False)
    one = one_map(OPS, some)
    assert one is not None
    one[0].sum().backward()
    assert some[1].weight.grad is None and some[0].weight.grad is not None and some[2].weight.grad is not None


def test_leaves_that_are_more_than_their_weights_are_refused() -> None:
    some = leaves()
    some[1].register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=r"hooked.*set_deterministic\(False\)"):
        one_map(OPS, some)
    assert one_map(reference(), some) is None


def test_a_model_on_the_cpu_says_why_not_and_stays_as_it_was() -> None:
    model = load("llama")
    ops, backend = model.ops, model.backend
    with pytest.raises(ValueError, match=r"deterministic=True.*NVIDIA GPU.*number of rows"):
        model.set_deterministic()
    assert not model.deterministic and model.ops is ops and model.backend is backend
    with pytest.raises(ValueError, match=r"deterministic=True.*NVIDIA GPU"):
        load("llama", deterministic=True)
    model.set_deterministic(False)
    assert not model.deterministic


def problem(head_dim: int) -> AttentionProblem:
    return AttentionProblem(device=CPU, dtype=torch.float32, head_dim=head_dim, softcap=False, window=False)


def test_other_attention_is_refused() -> None:
    for name in (None, "deterministic"):
        assert deterministic_backend(name, problem(64), reference().chunk_attention).name == "deterministic"
    with pytest.raises(ValueError, match=r"attn_implementation='sdpa'.*depend on the other rows"):
        deterministic_backend("sdpa", problem(64), reference().chunk_attention)
    with pytest.raises(ValueError, match=r"head_dim from 16 to 256, not 512"):
        deterministic_backend(None, problem(512), reference().chunk_attention)


@pytest.mark.parametrize("lengths", [(1,), (64, 64), (70, 1, 200, 63)])
def test_every_key_is_found_through_the_tables(lengths: tuple[int, ...]) -> None:
    where = pages(lengths, CPU)
    x = torch.randn(sum(lengths), 2, 3)
    pool = lay_in_pages(x, where)
    assert pool.shape == (sum(-(-n // PAGE) for n in lengths), 2, PAGE, 3)
    found: list[Tensor] = []
    for n, length in enumerate(lengths):
        at = torch.arange(length)
        found.append(pool[where.tables[n, at // PAGE].long(), :, at % PAGE])
    assert torch.equal(torch.cat(found), x)


def test_models_in_the_interpreter() -> None:
    pytest.importorskip("triton")
    here = Path(__file__).parent
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    env = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [*command, str(here / "interpreted_deterministic.py")],
        env=env, cwd=here.parent.parent, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
