"""What the configurations of mixture-of-experts decoders share, and their experts' names in the files."""

from dataclasses import dataclass, fields
from typing import Any, Self

from cuformers.base.errors import bad_argument
from cuformers.checkpoint.weight_map import Stack, WeightMap
from cuformers.models.config import ModelConfig


@dataclass(kw_only=True)
class MoEConfig(ModelConfig):
    """A decoder whose feed-forward blocks are chosen for each token."""

    num_experts_per_tok: int = 8
    """Experts that a token goes through."""
    output_router_logits: bool = False
    """`forward` returns the routers' logits, and adds their balancing loss to the loss."""
    router_aux_loss_coef: float = 0.001
    """Weight of the balancing loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_experts_per_tok > self.expert_count:
            allowed = f"at most the number of experts, {self.expert_count}"
            raise bad_argument("config.num_experts_per_tok", self.num_experts_per_tok, allowed, "Check config.json.")

    @property
    def expert_count(self) -> int:
        """Experts of a layer, whatever the file calls them."""
        return self.num_experts  # type: ignore[attr-defined]

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> Self:
        """Reads the number of experts under either of its names: which one a family's files use has changed."""
        own = {f.name for f in fields(cls)}
        for name, other in (("num_experts", "num_local_experts"), ("num_local_experts", "num_experts")):
            if name in own and other in raw:
                raw = {name: raw[other], **{k: v for k, v in raw.items() if k != other}}
        return super().from_dict(raw)


SINGLE_EXPERTS = WeightMap((
    Stack(
        (
            "model.layers.{layer}.mlp.experts.{index}.gate_proj.weight",
            "model.layers.{layer}.mlp.experts.{index}.up_proj.weight",
        ),
        "model.layers.{layer}.mlp.experts.gate_up_proj",
    ),
    Stack(
        "model.layers.{layer}.mlp.experts.{index}.down_proj.weight", "model.layers.{layer}.mlp.experts.down_proj"
    ),
))  # fmt: skip
"""Files that hold each expert by itself, as most do. Those that hold the stacks are read too."""
