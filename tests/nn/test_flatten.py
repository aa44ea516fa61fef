"""The door of a model: padding goes out, wherever it stands, and every real token comes back to its place."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from cuformers.nn.flatten import flatten, restore

MASKS = st.integers(1, 4).flatmap(
    lambda width: st.lists(st.lists(st.integers(0, 1), min_size=width, max_size=width), min_size=1, max_size=4)
)


@given(MASKS)
def test_real_tokens_come_back_to_their_places(rows: list[list[int]]) -> None:
    mask = torch.tensor(rows)
    ids = torch.arange(1, mask.numel() + 1).view(mask.shape)
    batch = flatten(ids, mask, None)
    assert batch.tokens.tolist() == ids[mask.bool()].tolist()
    assert list(batch.lengths) == [n for n in mask.sum(1).tolist() if n]
    starts = [row.index(1) for row in rows if 1 in row]
    expected = [c - s for row, s in zip([r for r in rows if 1 in r], starts) for c, real in enumerate(row) if real]
    assert batch.positions.tolist() == expected
    assert max(expected, default=0) <= batch.max_position < mask.shape[1]
    assert torch.equal(restore(batch.tokens, batch), ids * mask)


@pytest.mark.parametrize("mask", [[[0, 0, 1, 1]], [[1, 1, 0, 0]], [[1, 0, 1, 1]], [[1, 1, 1, 1]]])
@pytest.mark.parametrize("kind", [torch.long, torch.bool, torch.float32])
def test_any_kind_of_mask(mask: list[list[int]], kind: torch.dtype) -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    batch = flatten(ids, torch.tensor(mask).to(kind), None)
    assert batch.tokens.tolist() == [t for t, real in zip([5, 6, 7, 8], mask[0]) if real]


def test_a_rectangle_is_only_reshaped() -> None:
    ids = torch.arange(6).view(2, 3)
    for mask in (None, torch.ones(2, 3)):
        batch = flatten(ids, mask, None)
        assert batch.places is None and batch.lengths == (3, 3) and batch.max_position == 2
        assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2]
        hidden = torch.randn(6, 4)
        assert torch.equal(restore(hidden, batch), hidden.view(2, 3, 4))


def test_positions_that_are_given() -> None:
    ids, mask = torch.ones(2, 3, dtype=torch.long), torch.tensor([[0, 1, 1], [1, 1, 1]])
    batch = flatten(ids, mask, torch.tensor([[-1, 5, 6], [7, 8, 9]]))
    assert batch.positions.tolist() == [5, 6, 7, 8, 9] and batch.max_position == 9
    assert flatten(ids, None, torch.tensor([[3, 4, 5]])).positions.tolist() == [3, 4, 5, 3, 4, 5]
    padding = flatten(ids, mask, torch.tensor([[10**9, 0, 1], [0, 1, 2]]))
    assert padding.max_position == 2, "what stands at padding sizes no table"


def test_restored_values_keep_their_gradient() -> None:
    batch = flatten(torch.ones(2, 3, dtype=torch.long), torch.tensor([[0, 1, 1], [1, 0, 0]]), None)
    hidden = torch.randn(3, 2, requires_grad=True)
    weight = torch.randn(2, 3, 2)
    (restore(hidden, batch) * weight).sum().backward()
    assert hidden.grad is not None
    assert torch.equal(hidden.grad, torch.stack((weight[0, 1], weight[0, 2], weight[1, 0])))


def test_a_batch_without_any_token() -> None:
    batch = flatten(torch.ones(2, 3, dtype=torch.long), torch.zeros(2, 3), None)
    assert batch.lengths == () and batch.tokens.numel() == 0
    assert torch.equal(restore(torch.empty(0, 4), batch), torch.zeros(2, 3, 4))


IDS = torch.ones(2, 3, dtype=torch.long)


@pytest.mark.parametrize("ids, mask, positions, says", [
    (torch.ones(3, dtype=torch.long), None, None, r"input_ids must be integers.*\(3,\)"),
    (torch.ones(2, 3), None, None, "input_ids must be integers.*float32"),
    (IDS, torch.ones(2, 4), None, r"attention_mask.*\(2, 3\).*\(2, 4\)"),
    (IDS, torch.ones(2, 1, 3, 3), None, "attention_mask"),
    (IDS, None, torch.zeros(2, 4, dtype=torch.long), r"position_ids.*\(2, 4\)"),
    (IDS, None, torch.zeros(3, 2, 3, dtype=torch.long), r"position_ids.*\(3, 2, 3\)"),
    (IDS, None, torch.zeros(2, 3), "position_ids must be integers.*float32"),
    (IDS, None, torch.tensor([[0, 1, -2]]), "0 or more at real tokens, got -2"),
])  # fmt: skip
def test_what_does_not_fit(ids: Tensor, mask: Tensor | None, positions: Tensor | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        flatten(ids, mask, positions)
