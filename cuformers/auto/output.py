"""What a model's forward returns."""

from dataclasses import dataclass

from torch import Tensor

from cuformers.generation.output import ModelOutput


@dataclass(eq=False)
class BaseModelOutputWithPooling(ModelOutput):
    """Attribute, key and index access, as in Transformers."""

    last_hidden_state: Tensor | None = None
    """[B, S, H] in the model's dtype, after the final norm; zeros where padding stood."""
    pooler_output: Tensor | None = None
    """[B, H]: the pooler's map of each row's first token; None where the model has no pooler."""


@dataclass(eq=False)
class CausalLMOutputWithPast(ModelOutput):
    """Attribute, key and index access, as in Transformers."""

    loss: Tensor | None = None
    """Scalar, float32; only where labels were given."""
    logits: Tensor | None = None
    """[B, S, vocab] in the model's dtype; zeros where padding stood. None where the loss was computed without them."""
    past_key_values: None = None
    """Always None: the cache belongs to the engine, which `generate` runs on."""


@dataclass(eq=False)
class MoeCausalLMOutputWithPast(ModelOutput):
    """The same of a mixture of experts."""

    loss: Tensor | None = None
    """Scalar, float32; with the balancing loss where routers were asked for."""
    aux_loss: Tensor | None = None
    """The balancing loss of all layers before its coefficient, scalar, float32."""
    logits: Tensor | None = None
    """[B, S, vocab] in the model's dtype; zeros where padding stood. None where the loss was computed without them."""
    past_key_values: None = None
    """Always None, as above."""
    router_logits: tuple[Tensor, ...] | None = None
    """Of each layer with experts [B * S, E]; zeros where padding stood."""
