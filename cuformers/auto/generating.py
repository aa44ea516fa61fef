"""A model's engines: what generates with it, made when it is first asked for."""

from functools import cached_property

from torch import Tensor, nn

from cuformers.auto.batching.methods import BatchedGeneration
from cuformers.auto.computing import Computing
from cuformers.engine.cache_dtype import wants_fp8
from cuformers.engine.engine import Engine
from cuformers.kernels.hub.config import KernelConfig
from cuformers.nn.attention.over_pages import TritonAttention
from cuformers.nn.decoder import CausalLM, Decoder


class Generating(BatchedGeneration, Computing, CausalLM):
    """A CausalLM that generates, alone or with an assistant, with one call or as requests come."""

    _own = ("backend", "engine", "other_engine", "_batching")

    @cached_property
    def engine(self) -> Engine:
        """What generates. Weights that move between devices rule out captured graphs."""
        asked = self._attention_wanted is not None and self.backend.name != TritonAttention.name
        backend = self.backend if asked else None  # that one is the engine's own kernel, which reads the cache
        return Engine(self, backend, use_graphs=False if self._movers else None)

    def engine_with(self, assistant: "Generating | None" = None, kv_cache_dtype: str = "auto") -> Engine:
        """The engine whose tokens an assistant guesses, or whose cache is fp8; the last of these is kept.

        Without either it is the usual engine, which keeps buffers of its own.

        Raises:
            ValueError: the assistant can't guess for this model; fp8 is not possible here.
        """
        fp8 = wants_fp8(kv_cache_dtype, [self])
        if assistant is None and not fp8:
            return self.engine
        kept: Engine | None = self.__dict__.get("other_engine")
        if kept is None or kept.draft is not assistant or kept.fp8_cache != fp8:
            usual = self.engine
            use_graphs = False if assistant is not None and assistant._movers else usual.use_graphs
            kept = Engine(self, usual.backend, use_graphs=use_graphs, draft=assistant, kv_cache_dtype=kv_cache_dtype)
            self.__dict__["other_engine"] = kept
        return kept

    def set_deterministic(self, on: bool = True) -> None:
        super().set_deterministic(on)
        self.destroy_cached_continuous_batching_manager()

    def _take_layers(self, layers: KernelConfig | None) -> None:
        super()._take_layers(layers)
        if not self.anchor.is_meta:
            self.destroy_cached_continuous_batching_manager()

    @property
    def backbone(self) -> Decoder:
        return self.model

    @property
    def anchor(self) -> Tensor:
        return self.lm_head.weight

    def units(self) -> dict[str, nn.Module]:
        return {**{f"model.{name}": part for name, part in self.model.units().items()}, "lm_head": self.lm_head}
