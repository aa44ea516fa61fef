"""A model's engines: what generates with it, made when it is first asked for."""

from functools import cached_property
from typing import Any

from torch import Tensor, nn

from cuformers.auto.batching.methods import BatchedGeneration
from cuformers.auto.computing import Computing
from cuformers.engine.engine import Engine
from cuformers.nn.attention.over_pages import TritonAttention
from cuformers.nn.decoder import CausalLM, Decoder

_OWN = ("engine", "assisted_engine", "_batching")
"""Attributes that refer to this model, and that it makes when they are first used."""


class Generating(BatchedGeneration, Computing, CausalLM):
    """A CausalLM that generates, alone or with an assistant, with one call or as requests come."""

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has in common: the engines that generate, and their caches, stay this model's own."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    @cached_property
    def engine(self) -> Engine:
        """What generates. Weights that move between devices rule out captured graphs."""
        asked = self._attention_wanted is not None and self.backend.name != TritonAttention.name
        backend = self.backend if asked else None  # that one is the engine's own kernel, which reads the cache
        return Engine(self, backend, use_graphs=False if self._movers else None)

    def engine_with(self, assistant: "Generating | None") -> Engine:
        """The engine whose tokens an assistant guesses; the last assistant's is kept. None: the engine without one.

        Raises:
            ValueError: it can't guess for this model.
        """
        if assistant is None:
            return self.engine
        kept: Engine | None = self.__dict__.get("assisted_engine")
        if kept is None or kept.draft is not assistant:
            usual = self.engine
            use_graphs = False if assistant._movers else usual.use_graphs
            kept = Engine(self, usual.backend, use_graphs=use_graphs, draft=assistant)
            self.__dict__["assisted_engine"] = kept
        return kept

    def set_deterministic(self, on: bool = True) -> None:
        super().set_deterministic(on)
        self.destroy_cached_continuous_batching_manager()

    @property
    def backbone(self) -> Decoder:
        return self.model

    @property
    def anchor(self) -> Tensor:
        return self.lm_head.weight

    def units(self) -> dict[str, nn.Module]:
        return {**{f"model.{name}": part for name, part in self.model.units().items()}, "lm_head": self.lm_head}
