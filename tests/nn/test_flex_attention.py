"""FlexAttention: the blocks of its masks, how often it is compiled, and its gradients on the CPU."""

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cuformers.nn.attention import flex
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.step import full_step
from tests.nn.attention_matrix import Shape, inputs, results

BLOCK = flex.BLOCK


def pairs_seen(lengths: tuple[int, ...], window: int | None) -> torch.Tensor:
    """[T, T] bool, from the definition: same sequence, not later, within the window."""
    owner = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    at = torch.arange(len(owner))
    seen = (owner[:, None] == owner) & (at <= at[:, None])
    return seen if window is None else seen & (at > at[:, None] - window)


@pytest.mark.parametrize("window", [None, 1, 100, 128, 129, 300])
@pytest.mark.parametrize(
    "lengths", [(5,), (128,), (129,), (700,), (1, 300, 128, 13, 260), (128, 128, 128), (0, 200, 0)]
)
def test_blocks(lengths: tuple[int, ...], window: int | None) -> None:
    seen = pairs_seen(lengths, window)
    bounds = torch.tensor((0, *lengths)).cumsum(0).int()
    mask = flex.block_mask(bounds, sum(lengths), window)
    at = torch.arange(sum(lengths))
    assert torch.equal(mask.mask_mod(None, None, at[:, None], at[None, :]), seen)
    count = -(-len(seen) // BLOCK)
    for i in range(count):
        partial = mask.kv_indices[0, 0, i, : mask.kv_num_blocks[0, 0, i]].tolist()
        full = mask.full_kv_indices[0, 0, i, : mask.full_kv_num_blocks[0, 0, i]].tolist()
        assert not set(partial) & set(full)
        for j in range(count):
            block = seen[i * BLOCK : (i + 1) * BLOCK, j * BLOCK : (j + 1) * BLOCK]
            assert j in (*partial, *full) or not block.any(), "no block that is seen may be left out"
            assert j not in full or (block.all() and block.shape[1] == BLOCK)
            assert j not in partial or block.any(), "nothing is computed for nothing"


def test_it_is_compiled_once_for_all_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few times, rather: a stream of one block, and one of many, are not the same program to PyTorch."""
    counter, compile, given = CompileCounterWithBackend("aot_eager"), torch.compile, []

    def backend(graph: torch.fx.GraphModule, inputs: list) -> Any:
        given.extend(x for x in inputs if isinstance(x, torch.Tensor) and not x.dim())
        return counter(graph, inputs)

    monkeypatch.setattr(torch, "compile", lambda f, **options: compile(f, backend=backend, **options))
    flex._compiled.cache_clear()
    shape = Shape((1,), head_dim=16, softcap=3.0)
    attend = flex._compiled(shape.spec, False)
    for lengths in [(n,) for n in range(2, 900, 90)] + [(5, 300, 17), (200, 200), (64, 64, 64)]:
        for window in (None, 7, 150):
            x = inputs(Shape(lengths, head_dim=16, softcap=3.0, window=window), torch.float32)
            bounds = torch.tensor((0, *lengths)).cumsum(0).int()
            heads_first = (t.float().transpose(0, 1)[None] for t in (x.q, x.k, x.v))
            options = {"score_mod": flex._capped(3.0), "scale": 0.3, "enable_gqa": True}
            with torch.no_grad():
                attend(*heads_first, block_mask=flex.block_mask(bounds, sum(lengths), window), **options)
    flex._compiled.cache_clear()
    assert 1 <= counter.frame_count <= 4, counter.frame_count
    assert not given, "the softcap is a number of the program, not an input"


def test_each_kind_of_layer_is_compiled_by_itself() -> None:
    kinds = [flex._compiled(Shape((1,), heads=h, kv_heads=1).spec, g) for h in (1, 2) for g in (False, True)]
    assert len({id(kind) for kind in kinds}) == 4
    assert flex._compiled(Shape((9,), heads=2, kv_heads=1).spec, True) is kinds[-1]
    flex._compiled.cache_clear()


@pytest.mark.parametrize("sinks", [False, True])
def test_gradients_in_evaluation_mode(sinks: bool) -> None:
    shape = Shape((40, 9), head_dim=16, window=11, softcap=4.0, sinks=sinks)
    x = inputs(shape, torch.float32).to(torch.float32, torch.device("cpu"))
    expected = results(EagerAttention(), shape, x, train=True)
    found = results(flex.FlexAttention(), shape, x, train=True)
    assert set(found) == {"output", "q", "k", "v"} | ({"sinks"} if sinks else set())
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name])


def test_masks_are_shared_by_the_layers_of_a_step_and_by_no_others() -> None:
    backend, shape = flex.FlexAttention(), Shape((30,), head_dim=16, window=4)
    steps = [full_step(torch.arange(30), (30,), backend) for _ in range(2)]
    first = backend._mask(steps[0], 4)
    assert backend._mask(steps[0], 4) is first and backend._mask(steps[0], None) is not first
    assert backend._mask(steps[1], 4) is not first
    assert backend.forward(*(torch.zeros(0, n, 16) for n in (4, 2, 2)), shape.spec, steps[1]).shape == (0, 4, 16)
