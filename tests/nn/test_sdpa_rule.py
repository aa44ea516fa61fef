"""Which of PyTorch's kernels serves backend sdpa."""

from unittest.mock import patch

import pytest
import torch

from cuformers.nn.attention import sdpa
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.attention.sdpa import PRIORITY, SdpaAttention
from cuformers.nn.attention.sdpa_rule import CUDNN_LENGTH, SdpaProblem, choose_kernel
from tests.nn.attention_matrix import RAGGED, SQUARE, Shape, inputs, results

LONG, BF16 = CUDNN_LENGTH, torch.bfloat16
ROWS = [
    (None, torch.float32, 128, LONG, False, "torch"),
    ((9, 0), BF16, 128, LONG, False, "cudnn"),
    ((9, 0), torch.float16, 64, 4 * LONG, False, "cudnn"),
    ((9, 0), BF16, 128, LONG - 1, False, "flash"),
    ((9, 0), BF16, 256, LONG, False, "flash"),
    ((8, 0), BF16, 128, LONG, False, "flash"),
    ((10, 0), BF16, 128, LONG, False, "flash"),
    ((9, 0), BF16, 128, None, False, "varlen"),
    ((9, 0), BF16, 128, LONG, True, "varlen"),
    ((9, 0), BF16, 128, None, True, "varlen"),
    ((9, 0), torch.float32, 128, LONG, False, "efficient"),
    ((9, 0), BF16, 512, LONG, False, "efficient"),
    ((9, 0), BF16, 100, None, True, "flash"),
    ((7, 5), torch.float16, 128, None, False, "efficient"),
]


@pytest.mark.parametrize("on, dtype, head_dim, length, windowed, kernel", ROWS)
def test_the_rule(on, dtype, head_dim: int, length: int | None, windowed: bool, kernel: str) -> None:
    choice = choose_kernel(SdpaProblem(on, dtype, head_dim, length, windowed))
    assert choice.kernel == kernel and len(choice.why) > 20


def test_what_can_be_captured_is_what_varlen_takes() -> None:
    for on, dtype, head_dim, *_ in ROWS:
        with patch.object(sdpa, "capability", lambda device, on=on: on):
            problem = Shape((3,), head_dim=head_dim).problem(dtype, torch.device("cpu"), train=False)
            unknown = choose_kernel(SdpaProblem(on, dtype, head_dim, None, False)).kernel
            assert SdpaAttention().can_capture(problem) == (unknown == "varlen")


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("lengths", [RAGGED, SQUARE], ids=str)
def test_every_way_through_the_dense_path(kernel: str, lengths: tuple[int, ...]) -> None:
    """On the CPU, where PyTorch's math stands in for the kernels."""
    shape = Shape(lengths, head_dim=16)
    x = inputs(shape, torch.float32).to(torch.float32, torch.device("cpu"))
    priority = {kernel: [*PRIORITY[kernel], torch.nn.attention.SDPBackend.MATH]}
    with patch.object(sdpa, "_kernel", lambda *_: kernel), patch.dict(PRIORITY, priority):
        found = results(SdpaAttention(), shape, x, train=True)
    for what, tensor in results(EagerAttention(), shape, x, train=True).items():
        torch.testing.assert_close(found[what], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_that_is_chosen_is_the_one_that_runs(kernel: str, dtype: torch.dtype) -> None:
    from torch.profiler import ProfilerActivity, profile

    q, k, v = (torch.randn(2 * 256, heads, 128, dtype=dtype, device="cuda", requires_grad=True) for heads in (8, 4, 4))
    shape = Shape((256, 256), heads=8, kv_heads=4, head_dim=128)
    backend = SdpaAttention()
    step = sdpa_step(shape, backend)
    with patch.object(sdpa, "_kernel", lambda *_: kernel), profile(activities=[ProfilerActivity.CPU]) as seen:
        backend.forward(q, k, v, shape.spec, step).sum().backward()
    names = {event.key for event in seen.key_averages()}
    own = {"flash": "flash_attention", "cudnn": "cudnn_attention", "efficient": "efficient_attention"}[kernel]
    assert any(f"scaled_dot_product_{own}" in name for name in names)
    assert any(own in name and "backward" in name for name in names)


def sdpa_step(shape: Shape, backend: SdpaAttention):
    from cuformers.nn.step import full_step

    return full_step(torch.arange(sum(shape.lengths), device="cuda"), shape.lengths, backend)
