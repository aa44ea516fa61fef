"""The layers that may come from the hub, by Transformers' names, and what a model uses of them."""

from dataclasses import dataclass
from typing import Literal

from cuformers.base.errors import bad_argument

Kind = Literal["norm", "activation", "gated", "rotary"]


@dataclass(frozen=True, kw_only=True)
class Layer:
    """What a name stands for here."""

    kind: Kind
    activation: str = ""
    """Of the ops; empty where the layer has none."""
    parameters: int = 1
    """Tensors that its forward takes."""


LAYERS: dict[str, Layer] = {
    "RMSNorm": Layer(kind="norm"),
    "SiLU": Layer(kind="activation", activation="silu"),
    "GeLU": Layer(kind="activation", activation="gelu"),
    "GeluTanh": Layer(kind="activation", activation="gelu_tanh"),
    "NewGELU": Layer(kind="activation", activation="gelu_tanh"),
    "SiluAndMul": Layer(kind="gated", activation="silu"),
    "GeluAndMul": Layer(kind="gated", activation="gelu"),
    "GeluTanhAndMul": Layer(kind="gated", activation="gelu_tanh"),
    "rotary_pos_emb": Layer(kind="rotary", parameters=4),
}
"""The gated ones are ours: they compute act(gate) * up of [..., 2I], as the kernels of that name do."""
_BLOCK = "a feed-forward block is products that load quantized and adapted weights too: map its activation instead"
REFUSED = {
    "SwiGLUMLP": f"{_BLOCK} (SiLU, SiluAndMul)",
    "GeGLUMLP": f"{_BLOCK} (GeluTanh, GeluTanhAndMul)",
    "Linear": "products are our own op, quantized and adapted weights included",
    "ForCausalLMLoss": "the loss is our own op",
    "FastGELU": "no model here uses it",
    "QuickGELU": "no model here uses it",
    "MegaBlocksMoeMLP": "no model here has experts",
    "Llama4TextMoe": "no model here has experts",
}
"""Names of Transformers' mapping that are known and not possible, with the reason."""


@dataclass(frozen=True, kw_only=True)
class Uses:
    """What one model has of the layers: the shapes that a kernel must serve."""

    norms: tuple[tuple[int, float], ...]
    """Width and epsilon of its RMS norms, each pair once."""
    num_norms: int
    """How many norms it has."""
    plain_norms: bool
    """Whether all of them multiply by the weight itself, not by 1 + weight."""
    activations: tuple[tuple[str, int], ...]
    """The ops' activation and width of its gated feed-forward blocks, each pair once."""
    num_blocks: int
    """How many gated blocks it has."""
    rotations: tuple[tuple[int, int, int, int], ...]
    """Query heads, key heads, head dim and rotated dims of its attention, each once."""
    num_rotated: int
    """How many of its layers rotate."""

    def why_not(self, layer: Layer) -> str | None:
        """The reason why the model has no such layer; None where it has."""
        if layer.kind == "norm":
            return None if self.plain_norms else "its norms multiply by 1 + weight, which a hub RMSNorm does not"
        if layer.kind == "rotary":
            return None if self.rotations else "it has no rotary embedding"
        have = sorted({activation for activation, _ in self.activations})
        return None if layer.activation in have else f"its activation is {' and '.join(have) or 'none'}"

    def count(self, layer: Layer) -> int:
        """How many of the model's modules the layer stands for."""
        return {"norm": self.num_norms, "rotary": self.num_rotated}.get(layer.kind, self.num_blocks)


def check_name(name: object) -> None:
    """Raises a ValueError where no layer of that name can come from the hub, with the reason."""
    if isinstance(name, str) and name in LAYERS:
        return
    if isinstance(name, tuple):
        remedy = "Modules are fused here already, by our own kernels: name single layers."
    elif isinstance(name, str) and "attention" in name.lower():
        remedy = "Attention is chosen by attn_implementation."
    else:
        remedy = REFUSED.get(str(name), "")
    raise bad_argument("layer of kernel_mapping", name, f"one of {list(LAYERS)}", remedy and f"{remedy.rstrip('.')}.")
