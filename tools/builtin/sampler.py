"""Samples many rows at once from a Llama: left-padded prompts, a static cache, one captured CUDA graph a token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from llama import Cache, Llama
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn."""

    temperature: float = 0.8
    """Divides the logits."""
    top_k: int = 50
    """Tokens kept before top_p."""
    top_p: float = 0.95
    """Least probability mass kept of those."""
    repetition_penalty: float = 1.0
    """Logits of tokens already in the row are divided (positive) or multiplied (negative) by it."""


class Sampler:
    """Draws `new` tokens for each of `rows` prompts of at most `longest` tokens."""

    def __init__(self, model: Llama, rows: int, longest: int, new: int, how: Sampling, graph: bool) -> None:
        weight = model.model.norm.weight
        self.model, self.how, self.longest, self.new = model, how, longest, new
        self.cache = Cache.empty(model.shape, rows, longest + new, weight)
        device = weight.device
        self.token = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.slot = torch.zeros(1, dtype=torch.long, device=device)
        self.start = torch.zeros(rows, dtype=torch.long, device=device)
        self.out = torch.zeros(rows, longest + new + 1, dtype=torch.long, device=device)
        self.seen = torch.zeros(rows, model.shape.vocab_size, dtype=torch.bool, device=device)
        self.graph = self._capture() if graph else None

    def _capture(self) -> torch.cuda.CUDAGraph:
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):  # libraries set themselves up outside the capture
                self._advance()
        torch.cuda.current_stream().wait_stream(side)
        self.slot.zero_()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._advance()
        return graph

    def _draw(self, logits: Tensor) -> Tensor:
        how, logits = self.how, logits.float()
        if how.repetition_penalty != 1.0:
            punished = torch.where(logits > 0, logits / how.repetition_penalty, logits * how.repetition_penalty)
            logits = torch.where(self.seen, punished, logits)
        best, index = logits.topk(how.top_k)
        probs = (best / how.temperature).softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs > how.top_p, 0.0)
        # p / Exp(1) is largest at i with probability p_i: a draw without a host sync
        choice = (probs / torch.empty_like(probs).exponential_()).argmax(-1, keepdim=True)
        return index.gather(1, choice)

    def _take(self, logits: Tensor) -> None:
        self.token.copy_(self._draw(logits))
        self.seen.scatter_(1, self.token, True)
        self.out.index_copy_(1, self.slot, self.token)

    def _advance(self) -> None:
        """One token for every row: reads and writes only buffers that stay where they are."""
        logits = self.model.step(self.token, self.slot, self.start, self.cache)
        self.slot.add_(1)
        self._take(logits)

    @torch.inference_mode()
    def __call__(self, prompts: list[list[int]]) -> list[list[int]]:
        """New token ids, `new` for each prompt; the caller cuts at the end token."""
        width = max(map(len, prompts))
        if width > self.longest or len(prompts) != len(self.start):
            raise ValueError(
                f"{len(prompts)} prompts of up to {width} tokens; built for {len(self.start)} of {self.longest}"
            )
        device = self.token.device
        ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=device)
        self.start.copy_(torch.tensor([width - len(p) for p in prompts], device=device))
        self.seen.zero_().scatter_(1, ids, True)
        slots = torch.arange(width, device=device)
        parts = []
        for row in range(0, len(prompts), 256):  # the prompt's scores are rows x heads x width x S floats
            view = Cache(self.cache.data[:, :, row : row + 256])
            parts.append(self.model.step(ids[row : row + 256], slots, self.start[row : row + 256], view))
        self.slot.fill_(width)
        self._take(torch.cat(parts))
        for _ in range(self.new - 1):
            self.graph.replay() if self.graph else self._advance()
        return self.out[:, width : width + self.new].tolist()
