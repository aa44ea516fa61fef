"""The model that users hold: a CausalLM with Transformers' methods."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cuformers.auto.generate import generate
from cuformers.auto.generating import Generating
from cuformers.auto.output import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from cuformers.auto.pretrained import Pretrained, check_buildable, named
from cuformers.base.errors import bad_argument
from cuformers.engine.engine import why_no_engine
from cuformers.generation.config import GenerationConfig
from cuformers.models.base_config import BaseConfig
from cuformers.models.moe_config import MoEConfig
from cuformers.models.spec import ModelSpec
from cuformers.nn.flatten import FlatBatch, flatten, restore, take
from cuformers.nn.loss import loss_of_logits, next_tokens
from cuformers.nn.moe import balancing_loss, recorded_logits
from cuformers.nn.step import full_step


class PreTrainedModel(Pretrained, Generating):
    """A causal language model. Made by AutoModelForCausalLM; its class is named after its architecture."""

    def __init__(self, spec: ModelSpec, config: BaseConfig) -> None:
        assert spec.decoder is not None and spec.head is not None
        super().__init__(spec.decoder(config), spec.head(config))
        self.spec, self.config = spec, config
        self.name_or_path = ""
        self.generation_config = GenerationConfig.from_model_config(config.to_dict())

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        skip_logits: bool | None = None,
        output_router_logits: bool | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and the next-token loss where labels are given; in training mode then the loss alone.

        Args:
            input_ids: [B, S], integer.
            attention_mask: [B, S], 1 for real tokens; padding may stand on either side.
            position_ids: [B, S] or [1, S]; None counts from each row's first real token.
            labels: [B, S]; -100 is ignored. They are shifted inside; at positions of padding nothing is predicted.
            logits_to_keep: only so many last positions get logits; 0 means all.
            num_items_in_batch: what the summed loss is divided by; None means the labels that count.
            skip_logits: with labels: compute the loss without the logits of the whole batch, and return none. None does
                so in training mode.
            output_router_logits: of a mixture of experts: the routers' logits and their balancing loss too, which joins
                the loss with the weight config.router_aux_loss_coef. None does as the config says.
            use_cache: True is refused: `generate` keeps its cache in the engine.
            return_dict: False returns a tuple.
        """
        if use_cache:
            raise ValueError("use_cache=True is not possible in forward: use generate, whose engine keeps the cache.")
        if isinstance(logits_to_keep, bool) or not isinstance(logits_to_keep, int) or logits_to_keep < 0:
            raise bad_argument("logits_to_keep", logits_to_keep, "an integer from 0 on")
        if labels is not None and (labels.shape != input_ids.shape or logits_to_keep):
            shapes = f"{tuple(labels.shape)} for input_ids of shape {tuple(input_ids.shape)}"
            raise ValueError(f"labels must have input_ids' shape and all logits (logits_to_keep=0), got {shapes}.")
        if skip_logits and labels is None:
            raise bad_argument("skip_logits", skip_logits, "False or None without labels")
        batch = flatten(input_ids.to(self.device), attention_mask, position_ids)
        targets = None if labels is None else next_tokens(labels, batch, self.config.vocab_size)
        self.model.rotary.reserve(batch.max_position + 1, self.device)
        step = full_step(batch.positions, batch.lengths, self.backend)
        with recorded_logits(self.model, self._wants_routers(output_router_logits)) as routed:
            hidden = self.model(batch.tokens, step)
        skip = targets is not None and (self.training if skip_logits is None else skip_logits)
        logits = None if skip else self._logits(hidden, batch, logits_to_keep)
        loss = None if targets is None else self._loss(hidden, targets, logits, batch, num_items_in_batch)
        output = self._output(loss, logits, routed, batch)
        return output.to_tuple() if return_dict is False else output

    def _logits(self, hidden: Tensor, batch: FlatBatch, keep: int) -> Tensor:
        """[B, S or keep, vocab]; only those of the last positions are computed where keep is not 0."""
        if not keep:
            return restore(self.logits(hidden), batch)
        kept = restore(hidden, batch)[:, -keep:]
        return self.logits(kept.flatten(0, 1)).unflatten(0, kept.shape[:2])

    def _loss(
        self, hidden: Tensor, targets: Tensor, logits: Tensor | None, batch: FlatBatch, num_items: Tensor | int | None
    ) -> Tensor:
        """From the logits, where they are there anyway."""
        if logits is None:
            return self.loss(hidden, targets, num_items)
        return loss_of_logits(take(logits, batch), targets, num_items)

    def _wants_routers(self, asked: bool | None) -> bool:
        config = self.config
        if asked and not isinstance(config, MoEConfig):
            raise bad_argument("output_router_logits", asked, f"False for {config.model_type!r}, which has no experts")
        return isinstance(config, MoEConfig) and (config.output_router_logits if asked is None else asked)

    def _output(
        self, loss: Tensor | None, logits: Tensor | None, routed: list[Tensor], batch: FlatBatch
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast:
        config = self.config
        if not isinstance(config, MoEConfig):
            return CausalLMOutputWithPast(loss=loss, logits=logits)
        if not routed:
            return MoeCausalLMOutputWithPast(loss=loss, logits=logits)
        balance = balancing_loss(routed, config.num_experts_per_tok)
        if loss is not None:
            loss = loss + config.router_aux_loss_coef * balance.to(loss.device)
        shown = tuple(restore(one, batch).flatten(0, 1) for one in routed)
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=balance, logits=logits, router_logits=shown)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Continues prompts: see `cuformers.auto.generate.generate` for the arguments."""
        return generate(self, *args, **kwargs)

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.lm_head

    def can_generate(self) -> bool:
        return why_no_engine(self) is None

    @property
    def together(self) -> tuple[tuple[str, ...], ...]:
        return (("model.embed_tokens", "lm_head"),) if self.head.tied else ()

    def save_pretrained(self, save_directory: str | Path, *, max_shard_size: int | str = "50GB") -> None:
        """Writes config.json, generation_config.json and the weights, readable by Transformers.

        Each file appears whole or not at all; a tie is written once.
        """
        super().save_pretrained(save_directory, max_shard_size=max_shard_size)
        self.generation_config.save_pretrained(Path(save_directory))


def build(spec: ModelSpec, config: BaseConfig) -> PreTrainedModel:
    """A causal language model on the meta device, of a class named after its architecture.

    Raises:
        ValueError: the architecture generates nothing, or the configuration is not one of ours, or was changed to
            values that can be no model.
    """
    if spec.decoder is None:
        allowed = "an architecture with a decoder"
        raise bad_argument("model_type", spec.model_type, allowed, "It is an encoder: load it with AutoModel.")
    check_buildable(config)
    with torch.device("meta"):
        return named(PreTrainedModel, spec.config.architecture)(spec, config)
