"""How a model computes where it is: kernels, attention, and weights that move."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from cuformers.auto.hub_layers import HubLayers
from cuformers.base.errors import bad_argument
from cuformers.checkpoint.needs import Placement, is_layer
from cuformers.cuda.device import capability
from cuformers.kernels.hub.choose import choose
from cuformers.kernels.hub.config import KernelConfig
from cuformers.kernels.op import Choice, Problem
from cuformers.kernels.table import Kernels, select
from cuformers.models.base_config import BaseConfig
from cuformers.nn.attention.backend import AttentionBackend, AttentionProblem, problem_of
from cuformers.nn.attention.choose import attention_name, choose_backend
from cuformers.nn.attention.deterministic import deterministic_backend
from cuformers.nn.attention.eager import EagerAttention
from cuformers.nn.backbone import Backbone
from cuformers.nn.kernel_module import KernelModule, set_kernels
from cuformers.nn.offload import Offload
from cuformers.nn.rows import lay_in_rows
from cuformers.nn.spread import Spread
from cuformers.nn.uses import uses_of


class Computing(HubLayers, KernelModule):
    """A model that chooses what computes it, anew whenever it moves or changes mode."""

    config: BaseConfig
    _own: ClassVar[tuple[str, ...]] = ("backend",)
    """Attributes that refer to this model or hold its memory, and that it makes when they are first used."""
    _kernels_wanted: str = "auto"
    _attention_wanted: str | None = None
    _allow_all_kernels: bool = False
    _deterministic: bool = False
    _movers: tuple[Offload | Spread, ...] = ()

    def __getstate__(self) -> dict[str, Any]:
        """What a copy has in common: what this model made for itself stays its own."""
        return {name: value for name, value in self.__dict__.items() if name not in self._own}

    @property
    def backbone(self) -> Backbone:
        """The layers and what is before and behind them, without a head."""
        raise NotImplementedError

    @property
    def anchor(self) -> Tensor:
        """The weight that says where the model is, and of what dtype."""
        raise NotImplementedError

    def units(self) -> dict[str, nn.Module]:
        """The parts that are placed on devices as a whole, by name, in the order they run."""
        raise NotImplementedError

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.anchor.device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights."""
        return self.anchor.dtype

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
        return replace(problem_of(self.backbone.attention_specs, self.anchor), train=self.training)

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
            ValueError: there is no NVIDIA GPU, the model's layers carry a state, or kernels or an attention backend
                were asked for that can't do it; all stays as it was then.
        """
        if on and not self.backbone.attention_specs:
            raise bad_argument("deterministic", on, "False for a model whose layers carry a state")
        ops = self._table(self._kernels_wanted, on, self._layers_wanted)
        backend = self._choose_backend(self._attention_wanted, ops)
        set_kernels(self, ops)
        self._deterministic = on
        self._forget("engine", "other_engine")
        self.__dict__["backend"] = backend

    def kernels(self) -> tuple[Choice, ...]:
        """For each op the implementation in use, why it is another than our best one, and why the others are not."""
        return self.ops.choices

    def _take_layers(self, layers: KernelConfig | None) -> None:
        if not self.anchor.is_meta:
            set_kernels(self, self._table(self._kernels_wanted, self.deterministic, layers))

    def train(self, mode: bool = True) -> Self:
        """Switches between training and inference, and to the kernels of that mode."""
        for name, share in self.config.dropouts.items() if mode else ():
            if share:
                remedy = "Load the model with it set to 0.0: nothing here is dropped at random."
                raise bad_argument(f"config.{name}", share, "0 in training", remedy)
        before = self.training
        super().train(mode)
        if not self.anchor.is_meta:
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
        units = self.units()
        names = [name for name in units if is_layer(name)]
        layers = [units[name] for name in names]
        runs_on = tuple(placement.runs_on[name] for name in names)
        home = placement.units[next(iter(units))]
        self.hf_device_map = placement.hf_device_map
        off = [i for i, name in enumerate(names) if name in placement.offloaded]
        movers: list[Offload | Spread] = []
        if any(device != home for device in runs_on):
            movers.append(Spread(layers, runs_on, home))
        for device in sorted({runs_on[i] for i in off}, key=str):
            movers.append(Offload([layers[i] for i in off if runs_on[i] == device], device))
        if movers:
            self.backbone.runs_on, self._movers = runs_on, tuple(movers)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        if self._movers:
            raise ValueError("a model that is spread over devices can't be moved or cast: load it anew.")
        super()._apply(fn, recurse)  # .to(), .half(), .cuda(): each parameter by itself
        if not self.anchor.is_meta:
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
        return choose(layers, uses_of(self.backbone), problem, self.device, want)

    def _choose_backend(self, name: str | None, ops: Kernels) -> AttentionBackend:
        if not self.backbone.attention_specs:
            if name is not None:
                raise bad_argument("attn_implementation", name, "None for a model without attention")
            return EagerAttention()  # never called
        if ops.deterministic:
            return deterministic_backend(name, self.attention_problem, ops.chunk_attention)
        return choose_backend(name, self.attention_problem, allow_all_kernels=self._allow_all_kernels)

    def _forget(self, *names: str) -> None:
        for name in names:
            self.__dict__.pop(name, None)
