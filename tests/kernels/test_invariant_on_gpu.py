"""The bits of a deterministic table's ops on a GPU."""

import pytest
import torch

from .invariant_ops import Heads, check_attention, check_rope, check_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
GPU = torch.device("cuda", 0)
HEADS = [
    Heads(16, 8, 128),
    Heads(32, 8, 128),
    Heads(14, 2, 64),
    Heads(32, 32, 96),
    Heads(32, 8, 80, window=100),
    Heads(8, 4, 256, window=129, softcap=50.0),
    Heads(71, 1, 64),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_querys_bits_do_not_depend_on_how_its_sequence_is_cut(heads: Heads, dtype: torch.dtype) -> None:
    """Chunks of at most 64 rows and of more take tiles of different sizes."""
    check_attention(heads, 600, dtype, GPU, torch.equal, (1, 2, 17, 33, 64, 250))


def test_a_long_sequence() -> None:
    check_attention(Heads(16, 8, 128), 8000, torch.bfloat16, GPU, torch.equal, (1000, 512, 30))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("heads", [*HEADS, Heads(3, 1, 64)], ids=str)
def test_rotation_and_head_norms(heads: Heads, dtype: torch.dtype) -> None:
    check_rope(heads, dtype, GPU, torch.equal, (1, 2, 7, 32, 33, 300))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("V", "H"), [(151_936, 4096), (50_257, 896), (300, 40)])
def test_ops_that_work_a_row_at_a_time(V: int, H: int, dtype: torch.dtype) -> None:
    check_rows(dtype, GPU, torch.equal, (1, 2, 31, 32, 33, 64, 129), V, H)
