"""The model that users hold: a CausalLM with Transformers' methods."""

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from cuformers.auto.generate import generate
from cuformers.auto.output import CausalLMOutputWithPast
from cuformers.base.errors import bad_argument
from cuformers.checkpoint.atomic import write_json_atomic
from cuformers.checkpoint.needs import Placement
from cuformers.checkpoint.save import save_weights
from cuformers.cuda.device import capability
from cuformers.engine.engine import Engine
from cuformers.generation.config import GenerationConfig
from cuformers.kernels.op import Choice, Problem
from cuformers.kernels.table import select
from cuformers.models.config import ModelConfig
from cuformers.models.config_checks import check_config
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.backend import AttentionBackend
from cuformers.nn.attention.choose import choose_backend
from cuformers.nn.decoder import CausalLM
from cuformers.nn.flatten import flatten, restore
from cuformers.nn.kernel_module import set_kernels
from cuformers.nn.loss import next_token_loss
from cuformers.nn.offload import Offload
from cuformers.nn.rows import lay_in_rows
from cuformers.nn.spread import Spread
from cuformers.nn.step import full_step


class PreTrainedModel(CausalLM):
    """A causal language model. Made by AutoModelForCausalLM; its class is named after its architecture."""

    def __init__(self, spec: ModelSpec, config: ModelConfig) -> None:
        super().__init__(spec.decoder(config), spec.head(config))
        self.spec, self.config = spec, config
        self.name_or_path = ""
        self.generation_config = GenerationConfig.from_model_config(config.to_dict())
        self._kernels_wanted = "auto"
        self._attention_wanted: str | None = None
        self._movers: tuple[Offload | Spread, ...] = ()

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
        return choose_backend(self._attention_wanted, self.attention_problem)

    @cached_property
    def engine(self) -> Engine:
        """What generates. Weights that move between devices rule out captured graphs."""
        return Engine(self, self.backend, use_graphs=False if self._movers else None)

    def set_attn_implementation(self, name: str | None) -> None:
        """Changes the attention backend; None leaves the choice to us.

        Raises:
            ValueError: unknown, or it can't serve this model here; the present one stays then.
        """
        backend = choose_backend(name, self.attention_problem)
        self._attention_wanted = name
        self._forget("engine")
        self.__dict__["backend"] = backend

    def set_kernels(self, want: str = "auto") -> None:
        """Changes the kernels of this model: "auto", "reference" (plain PyTorch) or "triton".

        Raises:
            ValueError: unknown, or they can't serve this model here; the present ones stay then.
        """
        self._select(want)
        self._kernels_wanted = want

    def kernels(self) -> tuple[Choice, ...]:
        """For each op the implementation in use, and why the others are not."""
        return self.ops.choices

    def train(self, mode: bool = True) -> Self:
        """Switches between training and inference, and to the kernels of that mode."""
        drops = {"attention_dropout": self.config.attention_dropout, **self.config.extra}
        for name in ("attention_dropout", "resid_pdrop", "embd_pdrop"):
            if mode and drops.get(name):
                remedy = "Load the model with it set to 0.0: nothing here is dropped at random."
                raise bad_argument(f"config.{name}", drops[name], "0 in training", remedy)
        super().train(mode)
        if not self.lm_head.weight.is_meta:
            self._select(self._kernels_wanted)
        return self

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
        self._forget("backend", "engine")
        self._select(self._kernels_wanted)

    def _select(self, want: str) -> None:
        mode = "train" if self.training else "infer"
        problem = Problem(device=self.device.type, capability=capability(self.device), dtype=self.dtype, mode=mode)
        if want == "triton" and mode == "train":
            want = "auto"  # what has no backward is the reference's in training
        set_kernels(self, select(problem, want))

    def _forget(self, *names: str) -> None:
        for name in names:
            self.__dict__.pop(name, None)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        logits_to_keep: int = 0,
        num_items_in_batch: Tensor | int | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """Logits, and the next-token loss where labels are given.

        Args:
            input_ids: [B, S], integer.
            attention_mask: [B, S], 1 for real tokens; padding may stand on either side.
            position_ids: [B, S] or [1, S]; None counts from each row's first real token.
            labels: [B, S]; -100 is ignored. They are shifted inside.
            logits_to_keep: only so many last positions get logits; 0 means all.
            num_items_in_batch: what the summed loss is divided by; None means the labels that count.
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
        hidden = self.model(batch.tokens, step)
        if logits_to_keep:
            kept = restore(hidden, batch)[:, -logits_to_keep:]
            logits = self.logits(kept.flatten(0, 1)).unflatten(0, kept.shape[:2])
        else:
            logits = restore(self.logits(hidden), batch)
        loss = None if labels is None else next_token_loss(logits, labels, num_items_in_batch)
        output = CausalLMOutputWithPast(loss=loss, logits=logits)
        return output.to_tuple() if return_dict is False else output

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

    def named_layers(self) -> Iterator[tuple[str, nn.Module]]:
        """The decoder layers with their names."""
        for index, layer in enumerate(self.model.layers):
            yield f"model.layers.{index}", layer


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
