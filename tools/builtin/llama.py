"""A compact llama in plain PyTorch for the built-in model's scripts; parameter names are the checkpoint's.

Two ways through: `forward(ids)` for training (causal, no cache) and `step(...)` over a static cache for sampling.
The package's own model is not used here, so that the shipped weights do not depend on the code they help to test.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

MASKED = -30000.0
"""Added to a hidden score; finite, so that a row with every key hidden gives numbers and no NaN."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The part of a llama config.json these scripts read."""

    vocab_size: int
    """Rows of the embedding."""
    hidden_size: int
    """Width of the residual stream."""
    intermediate_size: int
    """Width of the gated MLP."""
    num_hidden_layers: int
    """Decoder layers."""
    num_attention_heads: int
    """Query heads."""
    num_key_value_heads: int
    """Key/value heads; divides the query heads."""
    head_dim: int
    """Width of a head; even."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    rms_norm_eps: float = 1e-5
    """Added to the mean square."""
    max_position_embeddings: int = 512
    """Longest row trained on."""

    def __post_init__(self) -> None:
        if self.num_attention_heads % self.num_key_value_heads or self.head_dim % 2:
            raise ValueError(f"heads {self.num_attention_heads}/{self.num_key_value_heads}, head_dim {self.head_dim}")

    @classmethod
    def read(cls, folder: Path) -> Shape:
        """The shape in `folder`/config.json; tied heads and default rope only."""
        config = json.loads((folder / "config.json").read_text())
        if not config["tie_word_embeddings"] or config.get("rope_scaling"):
            raise ValueError(f"{folder}: these scripts read tied llama checkpoints with plain rope only")
        config["rope_theta"] = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
        return cls(**{name: config[name] for name in cls.__dataclass_fields__})


class RMSNorm(nn.Module):
    """x / rms(x) * weight, the statistics in fp32."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return wide.to(x.dtype) * self.weight.to(x.dtype)


def rope(positions: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """cos and sin [..., 1, S, head_dim] in fp32 for positions [..., S]."""
    half = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    angle = positions[..., None].float() * shape.rope_theta**-half
    angle = torch.cat((angle, angle), -1).unsqueeze(-3)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding on [B, heads, S, head_dim], halves paired as in the checkpoint."""
    low, high = x.float().chunk(2, -1)
    return (x.float() * cos + torch.cat((-high, low), -1) * sin).to(x.dtype)


@dataclass
class Cache:
    """Keys and values of every layer, [layers, 2, B, kv heads, S, head_dim], allocated once."""

    data: Tensor

    @classmethod
    def empty(cls, shape: Shape, rows: int, length: int, like: Tensor) -> Cache:
        size = (shape.num_hidden_layers, 2, rows, shape.num_key_value_heads, length, shape.head_dim)
        return cls(torch.zeros(size, dtype=like.dtype, device=like.device))


class Attention(nn.Module):
    """Grouped-query attention."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        h, d = shape.hidden_size, shape.head_dim
        self.q_proj = nn.Linear(h, shape.num_attention_heads * d, bias=False)
        self.k_proj = nn.Linear(h, shape.num_key_value_heads * d, bias=False)
        self.v_proj = nn.Linear(h, shape.num_key_value_heads * d, bias=False)
        self.o_proj = nn.Linear(shape.num_attention_heads * d, h, bias=False)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated q, k and v, each [B, heads, S, head_dim]."""
        three = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (project(x).unflatten(-1, (-1, self.shape.head_dim)).transpose(1, 2) for project in three)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def step(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor, slots: Tensor, bias: Tensor) -> Tensor:
        """Writes k, v into cache [2, B, kv, S, d] at `slots` [Q], attends over all S with bias [B, 1, 1, Q, S]."""
        q, k, v = self.qkv(x, cos, sin)
        keys, values = cache[0].index_copy_(2, slots, k), cache[1].index_copy_(2, slots, v)
        rows, heads, length, dim = q.shape
        kv = self.shape.num_key_value_heads
        # A group's queries are stacked as rows of one product, so that its keys are read once and never repeated.
        q = q.reshape(rows, kv, heads // kv * length, dim)
        scores = (q @ keys.transpose(-1, -2)).float().unflatten(2, (-1, length)) * dim**-0.5 + bias
        out = scores.softmax(-1).to(values.dtype).flatten(2, 3) @ values
        return self.o_proj(out.reshape(rows, heads, length, dim).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """Pre-norm decoder layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)
        self.mlp = MLP(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))

    def step(self, x: Tensor, *rest: Tensor) -> Tensor:
        x = x + self.self_attn.step(self.input_layernorm(x), *rest)
        return x + self.mlp(self.post_attention_layernorm(x))


class Body(nn.Module):
    """What a checkpoint keeps under "model."."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers: list[Layer] = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))  # type: ignore
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps)


class Llama(nn.Module):
    """Embedding, layers, norm; the head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)

    def head(self, x: Tensor) -> Tensor:
        """Logits of final hidden states."""
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits [B, S, V] of token rows [B, S], causal."""
        x = self.model.embed_tokens(ids)
        cos, sin = rope(torch.arange(ids.shape[1], device=ids.device), self.shape)
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return self.head(x)

    def step(self, ids: Tensor, slots: Tensor, start: Tensor, cache: Cache) -> Tensor:
        """Logits [B, V] after the last of ids [B, Q], which take cache slots [Q]; row r begins at slot start[r]."""
        keys = torch.arange(cache.data.shape[-2], device=ids.device)
        visible = (keys[None, None] <= slots[None, :, None]) & (keys[None, None] >= start[:, None, None])
        bias = (~visible)[:, None, None].float() * MASKED
        cos, sin = rope((slots[None] - start[:, None]).clamp(min=0), self.shape)
        x = self.model.embed_tokens(ids)
        for layer, kept in zip(self.model.layers, cache.data, strict=True):
            x = layer.step(x, cos, sin, kept, slots, bias)
        return self.head(x[:, -1])

    @classmethod
    def load(cls, folder: Path, device: str, dtype: torch.dtype) -> Llama:
        """The model of a Hugging Face folder with one safetensors file."""
        with torch.device("meta"):
            model = cls(Shape.read(folder))
        weights = load_file(folder / "model.safetensors", device=device)
        model.load_state_dict({k: v.to(dtype) for k, v in weights.items() if k != "lm_head.weight"}, assign=True)
        return model.eval().requires_grad_(False)

    def save(self, folder: Path, special: dict[str, int]) -> None:
        """Writes model.safetensors (bf16), config.json and generation_config.json; `special` holds *_token_id."""
        weights = {name: p.detach().to("cpu", torch.bfloat16).contiguous() for name, p in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        fixed = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
                 "tie_word_embeddings": True, "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
                 "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": True}  # fmt: skip
        (folder / "config.json").write_text(json.dumps({**fixed, **asdict(self.shape), **special}, indent=2) + "\n")
