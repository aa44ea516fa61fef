"""Layers in groups of one size: every layer has its own place, and layers of a group share a window."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuformers.nn.cache import PagedCache, layout


@given(st.lists(st.sampled_from([None, 8, 16]), min_size=1, max_size=40), st.booleans())
def test_every_layer_has_a_place_of_its_own(windows: list[int | None], apart: bool) -> None:
    made = layout(windows, apart=apart)
    assert len(set(made.places)) == len(windows) == len(made.places)
    for (group, number), window in zip(made.places, windows):
        assert 0 <= number < made.size and made.windows[group] == (window if apart else None)
    assert len(made.windows) * made.size >= len(windows)
    if not apart or len(set(windows)) == 1:
        assert len(made.windows) * made.size == len(windows)


@pytest.mark.parametrize("name, kinds, groups", [("gemma2", [8, None] * 13, 2), ("gemma3", ([8] * 5 + [None]) * 4, 6)])
def test_real_patterns(name: str, kinds: list[int | None], groups: int) -> None:
    made = layout(kinds)
    assert len(made.windows) == groups and len(made.windows) * made.size == len(kinds), name


def test_layers_of_different_groups_share_memory_by_page() -> None:
    made = layout([8, None])
    cpu = torch.device("cpu")
    cache = PagedCache(
        layout=made, devices=[cpu] * 2, num_pages=3, num_kv_heads=2, head_dim=4, page_size=16, dtype=torch.float32
    )
    assert cache.keys(0).data_ptr() == cache.keys(1).data_ptr() and cache.group(0) != cache.group(1)
    assert cache.nbytes == 3 * PagedCache.page_bytes(made.size, 2, 4, 16, torch.float32)
