"""AutoModel: a model without a head, whose results are hidden states; encoders, and decoders too."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cuformers.auto.causal_lm import ModelFactory
from cuformers.auto.output import BaseModelOutputWithPooling
from cuformers.auto.pretrained import Pretrained, check_buildable, named
from cuformers.base.errors import bad_argument
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.needs import is_layer
from cuformers.checkpoint.prefix import BareWeightMap
from cuformers.checkpoint.weight_map import WeightMap
from cuformers.generation.config import GenerationConfig
from cuformers.models.base_config import BaseConfig
from cuformers.models.spec import ModelSpec
from cuformers.nn.backbone import Backbone
from cuformers.nn.flatten import FlatBatch, flatten, restore, restore_rows, take
from cuformers.nn.step import Step, full_step


class BaseModel(Pretrained):
    """A model without a head. Made by AutoModel; its class is named after its architecture.

    Its modules are the backbone's, under the names that the backbone has for them, as in Transformers.
    """

    def __init__(self, spec: ModelSpec, config: BaseConfig, *, without: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.spec, self.config = spec, config
        self.name_or_path = ""
        backbone = spec.backbone(config)
        for name in without:
            setattr(backbone, name, None)
        self.__dict__["_backbone"] = backbone  # no module of this one: its parts are
        for name, part in backbone.named_children():
            self.add_module(name, part)

    @property
    def backbone(self) -> Backbone:
        return self.__dict__["_backbone"]

    @property
    def anchor(self) -> Tensor:
        return self.backbone.embedding.weight

    def units(self) -> dict[str, nn.Module]:
        return self.backbone.units()

    @property
    def together(self) -> tuple[tuple[str, ...], ...]:
        return (tuple(name for name in self.units() if not is_layer(name)),)

    @property
    def saved_as(self) -> WeightMap:
        return BareWeightMap(self.spec.weight_map, self.spec.prefix, self.spec.home, in_file=False)

    def config_to_save(self) -> Mapping[str, Any]:
        return {**super().config_to_save(), "architectures": [self.config.base_architecture]}

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> BaseModelOutputWithPooling | tuple[Any, ...]:
        """Last hidden states, and the pooler's output where the model has a pooler.

        Args:
            input_ids: [B, S], integer.
            attention_mask: [B, S], 1 for real tokens; padding may stand on either side.
            token_type_ids: [B, S], which text of a pair each token belongs to; None is the first.
            position_ids: [B, S] or [1, S]; None counts from each row's first real token.
            use_cache: True is refused: nothing is kept.
            return_dict: False returns a tuple.

        Raises:
            ValueError: shapes that do not fit, a row longer than the model's learned positions, or token types that
                the model does not know.
        """
        if use_cache:
            raise bad_argument("use_cache", use_cache, "False or None", "Load AutoModelForCausalLM to generate.")
        batch = flatten(input_ids.to(self.device), attention_mask, position_ids)
        types = self._token_types(token_type_ids, batch)
        self._check_length(batch)
        self.backbone.rotary.reserve(batch.max_position + 1, self.device)
        step = full_step(batch.positions, batch.lengths, self.backend)
        hidden = self.backbone.hidden_states(batch.tokens, step, types)
        output = BaseModelOutputWithPooling(restore(hidden, batch), self._pooled(hidden, batch, step))
        return output.to_tuple() if return_dict is False else output

    def _token_types(self, given: Tensor | None, batch: FlatBatch) -> Tensor | None:
        if given is None:
            return None
        if not self.config.num_token_types:
            allowed = f"nothing for a {self.config.model_type} model"
            raise bad_argument("token_type_ids", tuple(given.shape), allowed, "Leave it out: it tells no texts apart.")
        if tuple(given.shape) != batch.shape or given.dtype.is_floating_point:
            raise bad_argument("token_type_ids", f"{given.dtype} {tuple(given.shape)}", f"integers {batch.shape}")
        return take(given.to(self.device), batch)

    def _check_length(self, batch: FlatBatch) -> None:
        limit = self.backbone.max_positions
        if limit is not None and batch.max_position >= limit:
            raise ValueError(
                f"a row reaches position {batch.max_position}, but the model has learned {limit} positions: "
                "cut the text off, for example with truncation=True in the tokenizer's or the pipeline's call."
            )

    def _pooled(self, hidden: Tensor, batch: FlatBatch, step: Step) -> Tensor | None:
        assert step.cu_seqlens is not None, "a full step carries cu_seqlens"
        starts = step.cu_seqlens[:-1].long()
        pooled = self.backbone.pool(hidden[starts])
        return None if pooled is None else restore_rows(pooled, batch, starts)


class AutoModel(ModelFactory[BaseModel]):
    """Makes models without a head; it is never instantiated itself.

    A checkpoint of a model with a head is read too: what belongs to the head is left out, and said.
    """

    @classmethod
    def _build(cls, spec: ModelSpec, config: BaseConfig, index: Index | None) -> BaseModel:
        without: tuple[str, ...] = ()
        if index is not None:
            weight_map, _ = cls._names(spec, index)
            homes = [home for name in index.entries for home in weight_map.to_module(name)]
            without = tuple(p for p in spec.optional if not any(home.startswith(f"{p}.") for home in homes))
        check_buildable(config)
        with torch.device("meta"):
            return named(BaseModel, config.base_architecture)(spec, config, without=without)

    @classmethod
    def _names(cls, spec: ModelSpec, index: Index) -> tuple[WeightMap, tuple[str, ...]]:
        with_head = any(name.startswith(spec.prefix) for name in index.entries)
        weight_map = BareWeightMap(spec.weight_map, spec.prefix, spec.home, in_file=with_head)
        return weight_map, tuple(name for name in index.entries if weight_map.is_outside(name))

    @classmethod
    def _read_generation(cls, model: BaseModel, folder: Path, given: GenerationConfig | None) -> None:
        if given is not None:
            raise bad_argument("generation_config", type(given).__name__, "nothing for AutoModel", "It can't generate.")
