"""The model that users hold: a CausalLM with Transformers' methods."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cuformers.auto.computing import Computing
from cuformers.auto.generate import generate
from cuformers.auto.output import CausalLMOutputWithPast, MoeCausalLMOutputWithPast
from cuformers.base.errors import bad_argument
from cuformers.checkpoint.atomic import write_json_atomic
from cuformers.checkpoint.save import save_weights
from cuformers.generation.config import GenerationConfig
from cuformers.models.config import ModelConfig
from cuformers.models.config_checks import check_config
from cuformers.models.moe_config import MoEConfig
from cuformers.models.spec import ModelSpec
from cuformers.nn.flatten import FlatBatch, flatten, restore
from cuformers.nn.loss import next_token_loss
from cuformers.nn.moe import balancing_loss, recorded_logits
from cuformers.nn.step import full_step


class PreTrainedModel(Computing):
    """A causal language model. Made by AutoModelForCausalLM; its class is named after its architecture."""

    def __init__(self, spec: ModelSpec, config: ModelConfig) -> None:
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
        output_router_logits: bool | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | MoeCausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and the next-token loss where labels are given.

        Args:
            input_ids: [B, S], integer.
            attention_mask: [B, S], 1 for real tokens; padding may stand on either side.
            position_ids: [B, S] or [1, S]; None counts from each row's first real token.
            labels: [B, S]; -100 is ignored. They are shifted inside.
            logits_to_keep: only so many last positions get logits; 0 means all.
            num_items_in_batch: what the summed loss is divided by; None means the labels that count.
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
        batch = flatten(input_ids.to(self.device), attention_mask, position_ids)
        self.model.rotary.reserve(batch.max_position + 1, self.device)
        step = full_step(batch.positions, batch.lengths, self.backend)
        with recorded_logits(self.model, self._wants_routers(output_router_logits)) as routed:
            hidden = self.model(batch.tokens, step)
        if logits_to_keep:
            kept = restore(hidden, batch)[:, -logits_to_keep:]
            logits = self.logits(kept.flatten(0, 1)).unflatten(0, kept.shape[:2])
        else:
            logits = restore(self.logits(hidden), batch)
        loss = None if labels is None else next_token_loss(logits, labels, num_items_in_batch)
        output = self._output(loss, logits, routed, batch)
        return output.to_tuple() if return_dict is False else output

    def _wants_routers(self, asked: bool | None) -> bool:
        config = self.config
        if asked and not isinstance(config, MoEConfig):
            raise bad_argument("output_router_logits", asked, f"False for {config.model_type!r}, which has no experts")
        return isinstance(config, MoEConfig) and (config.output_router_logits if asked is None else asked)

    def _output(
        self, loss: Tensor | None, logits: Tensor, routed: list[Tensor], batch: FlatBatch
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

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Number of weights, tied ones once."""
        return sum(p.numel() for p in self.parameters() if p.requires_grad or not only_trainable)

    def get_memory_footprint(self) -> int:
        """Bytes of the weights."""
        return sum(p.nbytes for p in self.parameters())

    def get_input_embeddings(self) -> nn.Embedding:
        """The embedding of tokens."""
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Linear:
        """The head."""
        return self.lm_head

    def can_generate(self) -> bool:
        """True: every causal language model can."""
        return True

    def save_pretrained(self, save_directory: str | Path, *, max_shard_size: int | str = "50GB") -> None:
        """Writes config.json, generation_config.json and the weights, readable by Transformers.

        Each file appears whole or not at all; a tie is written once.
        """
        folder = Path(save_directory)
        save_weights(
            self.state_dict(), folder, weight_map=self.spec.weight_map, max_shard_size=max_shard_size
        )
        config = {**self.config.to_dict(), "dtype": str(self.dtype).removeprefix("torch.")}
        write_json_atomic(folder / "config.json", config)
        self.generation_config.save_pretrained(folder)


def build(spec: ModelSpec, config: ModelConfig) -> PreTrainedModel:
    """A model on the meta device, of a class named after its architecture.

    Raises:
        ValueError: the configuration is not one of ours, or was changed to values that can be no model.
    """
    if not isinstance(config, ModelConfig):
        raise bad_argument("config", type(config), "what cuformers' AutoConfig makes", "Use cuformers.AutoConfig.")
    check_config(config)
    kind = type(config.architecture, (PreTrainedModel,), {"__doc__": PreTrainedModel.__doc__})
    with torch.device("meta"):
        return kind(spec, config)
