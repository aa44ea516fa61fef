"""Whether a CUDA graph can hold somebody's kernel."""

from collections.abc import Callable
from typing import Any

import torch

from cuformers.cuda.graphs import capture
from cuformers.kernels.hub.gate import FAILURES, samples
from cuformers.kernels.hub.layers import Layer, Uses


def capture_problem(
    function: Callable[..., Any], layer: Layer, uses: Uses, device: torch.device, dtype: torch.dtype
) -> str | None:
    """Why steps that call it must run without a graph; None where they need not, or there is no GPU."""
    if device.type != "cuda":
        return None
    sample = next(iter(samples(layer, uses, device, dtype)))
    given = tuple(t.clone() for t in sample.tensors)
    with torch.no_grad():
        try:
            graph = capture(lambda: function(*given, *sample.numbers), device=device)
        except FAILURES as problem:
            return f"a CUDA graph can't hold it, so steps are not captured: {str(problem).splitlines()[0]}"
        for tensor in given:
            tensor.mul_(0.5)
        expected = function(*(t.clone() for t in given), *sample.numbers)
        graph.replay()
    pairs = [(graph.result, expected)] if isinstance(expected, torch.Tensor) else list(zip(graph.result, expected))
    same = all(torch.allclose(a, b, rtol=1e-2, atol=1e-2) for a, b in pairs)
    return None if same else "its result in a CUDA graph is another one, so steps are not captured"
