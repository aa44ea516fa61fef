"""How a model computes where it is: kernels, attention, engines, and weights that move."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor, nn

from cuformers.auto.batching.methods import BatchedGeneration
from cuformers.auto.hub_layers import HubLayers
from cuformers.base.errors import bad_argument
from cuformers.checkpoint.needs import Placement
from cuformers.cuda.device import capability
from cuformers.engine.cache_dtype import wants_fp8
from cuformers.engine.engine import Engine
from cuformers.kernels.hub.choose import choose
from cuformers.kernels.hub.config import KernelConfig
from cuformers.kernels.op import Choice, Problem
from cuformers.kernels.table import Kernels, select
from cuformers.models.config import ModelConfig
from cuformers.nn.attention.backend import AttentionBackend, AttentionProblem
from cuformers.nn.attention.choose import attention_name, choose_backend
from cuformers.nn.attention.deterministic import deterministic_backend
from cuformers.nn.attention.over_pages import TritonAttention
from cuformers.nn.decoder import CausalLM, Decoder, HeadSpec
from cuformers.nn.kernel_module import set_kernels
from cuformers.nn.offload import Offload
from cuformers.nn.rows import lay_in_rows
from cuformers.nn.spread import Spread
from cuformers.nn.uses import uses_of

_OWN = ("backend", "engine", "other_engine", "_batching")
"""Attributes that refer to this model or hold its memory, and that it makes when they are first used."""


class Computing(BatchedGeneration, HubLayers, CausalLM):
    """A CausalLM that chooses what computes it, anew whenever it moves or changes mode."""

    config: ModelConfig

    def __init__(self, decoder: Decoder, head: HeadSpec) -> None:
        super().__init__(decoder, head)
        self._kernels_wanted = "auto"
        self._attention_wanted: str | None = None
        self._allow_all_kernels = False
        self._deterministic = False
        self._movers: tuple[Offload | Spread, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has in common: the engines that generate, and their caches, stay this model's own."""
        return {name: value for name, value in self.__dict__.items() if name not in _OWN}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.lm_head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.lm_head.weight.dtype

    @property
    def attn_implementation(self) -> str:
        """Name of the attention backend in use."""
        return self.backend.name

    @cached_property
    def backend(self) -> AttentionBackend:
        """The attention backend of prompts and training."""
        return self._choose_backend(self._attention_wanted, self.ops)

    @property
    def attention_problem(self) -> AttentionProblem:
        """What this model asks of an attention backend, where it is and in its mode."""
        return replace(super().attention_problem, train=self.training)

    @cached_property
    def engine(self) -> Engine:
        """What generates. Weights that move between devices rule out captured graphs."""
        asked = self._attention_wanted is not None and self.backend.name != TritonAttention.name
        backend = self.backend if asked else None  # that one is the engine's own kernel, which reads the cache
        return Engine(self, backend, use_graphs=False if self._movers else None)

    def engine_with(self, assistant: "Computing | None" = None, kv_cache_dtype: str = "auto") -> Engine:
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

    def set_attn_implementation(
        self, attn_implementation: str | Mapping[str, str] | None, allow_all_kernels: bool = False
    ) -> None:
        """Changes the attention backend.

        Args:
            attn_implementation: a name of the table in docs/nvidia-gpu.md, "paged|NAME", a name that was registered
                with `AttentionInterface`, or a hub reference org/repo[@revision][:function]; None leaves it to us.
            allow_all_kernels: a hub reference may be to a publisher that the hub does not list as trusted: its code
                runs in this process.

        Raises:
            ValueError: unknown, or it can't serve this model here; the present one stays then.
        """
        name = attention_name(attn_implementation)
        self._allow_all_kernels, before = allow_all_kernels, self._allow_all_kernels
        try:
            backend = self._choose_backend(name, self.ops)
        except ValueError:
            self._allow_all_kernels = before
            raise
        self._attention_wanted = None if self.deterministic else name
        self._forget("engine", "other_engine")
        self.__dict__["backend"] = backend

    def set_kernels(self, want: str = "auto") -> None:
        """Changes the kernels of this model: "auto", "reference" (plain PyTorch) or "triton".

        Raises:
            ValueError: unknown, or they can't serve this model here; the present ones stay then.
        """
        self._select(want)
        self._kernels_wanted = want

    @property
    def deterministic(self) -> bool:
        """Whether a token's logits have the same bits whatever else is computed with it."""
        return self._deterministic

    def set_deterministic(self, on: bool = True) -> None:
        """Makes tokens and log-probabilities independent, bit by bit, of how they are computed.

        On one model of GPU it does not matter then which other prompts are in the batch, how prompts are cut into
        chunks, what comes from the cache, whether steps are captured or a request was preempted; and `forward` gives
        the same bits as generation, in training too.

        Raises:
            ValueError: there is no NVIDIA GPU, or kernels or an attention backend were asked for that can't do it; all
                stays as it was then.
        """
        ops = self._table(self._kernels_wanted, on, self._layers_wanted)
        backend = self._choose_backend(self._attention_wanted, ops)
        set_kernels(self, ops)
        self._deterministic = on
        self._forget("engine", "other_engine")
        self.__dict__["backend"] = backend
        self.destroy_cached_continuous_batching_manager()

    def kernels(self) -> tuple[Choice, ...]:
        """For each op the implementation in use, why it is another than our best one, and why the others are not."""
        return self.ops.choices

    def _take_layers(self, layers: KernelConfig | None) -> None:
        if not self.lm_head.weight.is_meta:
            set_kernels(self, self._table(self._kernels_wanted, self.deterministic, layers))
            self.destroy_cached_continuous_batching_manager()

    def train(self, mode: bool = True) -> Self:
        """Switches between training and inference, and to the kernels of that mode."""
        drops = {**vars(self.config), **self.config.extra}
        for name in ("attention_dropout", "resid_pdrop", "embd_pdrop", "router_jitter_noise"):
            if mode and drops.get(name):
                remedy = "Load the model with it set to 0.0: nothing here is dropped at random."
                raise bad_argument(f"config.{name}", drops[name], "0 in training", remedy)
        before = self.training
        super().train(mode)
        if not self.lm_head.weight.is_meta:
            try:
                self._select(self._kernels_wanted)
                if mode != before:
                    self._attend_in_mode()
            except (ValueError, ImportError):  # a kernel or an attention that was asked for can't serve this mode
                super().train(before)
                self._select(self._kernels_wanted)
                raise
        return self

    def _attend_in_mode(self) -> None:
        """Chooses attention for the present mode."""
        self.__dict__["backend"] = self._choose_backend(self._attention_wanted, self.ops)

    def follow(self, placement: Placement) -> None:
        """Sets up what computing needs where parts of the model lie or run on different devices.

        Layers on the CPU beside a GPU are streamed to it; over several GPUs the hidden states follow the weights.
        """
        layers = list(self.model.layers)
        names = [name for name, _ in self.named_layers()]
        runs_on = tuple(placement.runs_on[name] for name in names)
        home = placement.units["model.embed_tokens"]
        self.hf_device_map = placement.hf_device_map
        off = [i for i, name in enumerate(names) if name in placement.offloaded]
        movers: list[Offload | Spread] = []
        if any(device != home for device in runs_on):
            movers.append(Spread(layers, runs_on, home))
        for device in sorted({runs_on[i] for i in off}, key=str):
            movers.append(Offload([layers[i] for i in off if runs_on[i] == device], device))
        if movers:
            self.model.runs_on, self._movers = runs_on, tuple(movers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self._movers:
            raise ValueError("a model that is spread over devices can't be moved or cast: load it anew.")
        super()._apply(fn, recurse)  # .to(), .half(), .cuda(): each parameter by itself
        if not self.lm_head.weight.is_meta:
            self.settle()
        return self

    def settle(self) -> None:
        """Chooses layout, kernels and attention for where the weights are now; after every move."""
        lay_in_rows(self)
        self._forget("backend", "engine", "other_engine")
        try:
            self._select(self._kernels_wanted)
        except (ValueError, ImportError):
            if self._layers_wanted is not None:  # a hub kernel that fails here: the moved model works without it
                self._use_kernels = False
                self._select(self._kernels_wanted)
            raise

    def _select(self, want: str) -> None:
        set_kernels(self, self._table(want, self.deterministic, self._layers_wanted))

    def _table(self, want: str, deterministic: bool, layers: KernelConfig | None) -> Kernels:
        mode = "train" if self.training else "infer"
        problem = Problem(device=self.device.type, capability=capability(self.device), dtype=self.dtype, mode=mode)
        if want == "triton" and mode == "train":
            want = "auto"  # what has no backward is the reference's in training
        if layers is None:
            return select(problem, want, deterministic=deterministic)
        if deterministic:
            remedy = "Others' kernels promise nothing about bits: model.set_use_kernels(False) comes first."
            raise bad_argument("deterministic", True, "False with kernel_config", remedy)
        return choose(layers, uses_of(self.model), problem, self.device, want)

    def _choose_backend(self, name: str | None, ops: Kernels) -> AttentionBackend:
        if ops.deterministic:
            return deterministic_backend(name, self.attention_problem, ops.chunk_attention)
        return choose_backend(name, self.attention_problem, allow_all_kernels=self._allow_all_kernels)

    def _forget(self, *names: str) -> None:
        for name in names:
            self.__dict__.pop(name, None)

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The decoder layers with their names."""
        for index, layer in enumerate(self.model.layers):
            yield f"model.layers.{index}", layer
