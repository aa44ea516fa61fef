"""The model that users hold: a CausalLM with Transformers' methods."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from cuformers.auto.batching.manager import ContinuousBatchingManager
from cuformers.auto.batching.output import GenerationOutput
from cuformers.auto.batching.session import Batching
from cuformers.auto.batching.sized_engine import SizedEngine
from cuformers.auto.batching.submit import Terms
from cuformers.auto.generate import generate
from cuformers.auto.output import CausalLMOutputWithPast
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.checkpoint.atomic import write_json_atomic
from cuformers.checkpoint.needs import Placement
from cuformers.checkpoint.save import save_weights
from cuformers.cuda.device import capability
from cuformers.engine.engine import Engine
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.config import GenerationConfig
from cuformers.generation.stopping import Decodes
from cuformers.kernels.op import Choice, Problem
from cuformers.kernels.table import Kernels, select
from cuformers.models.config import ModelConfig
from cuformers.models.config_checks import check_config
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention.backend import AttentionBackend
from cuformers.nn.attention.choose import choose_backend
from cuformers.nn.attention.deterministic import deterministic_backend
from cuformers.nn.decoder import CausalLM
from cuformers.nn.flatten import flatten, restore
from cuformers.nn.kernel_module import set_kernels
from cuformers.nn.loss import next_token_loss
from cuformers.nn.offload import Offload
from cuformers.nn.rows import lay_in_rows
from cuformers.nn.spread import Spread
from cuformers.nn.step import full_step

_OWN = ("engine", "assisted_engine", "_batching")
"""Attributes that refer to this model, and that it makes when they are first used."""


class PreTrainedModel(CausalLM):
    """A causal language model. Made by AutoModelForCausalLM; its class is named after its architecture."""

    def __init__(self, spec: ModelSpec, config: ModelConfig) -> None:
        super().__init__(spec.decoder(config), spec.head(config))
        self.spec, self.config = spec, config
        self.name_or_path = ""
        self.generation_config = GenerationConfig.from_model_config(config.to_dict())
        self._kernels_wanted = "auto"
        self._attention_wanted: str | None = None
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

    @cached_property
    def engine(self) -> Engine:
        """What generates. Weights that move between devices rule out captured graphs."""
        backend = self.backend if self._attention_wanted is not None else None
        return Engine(self, backend, use_graphs=False if self._movers else None)

    def engine_with(self, assistant: "PreTrainedModel | None") -> Engine:
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

    def set_attn_implementation(self, name: str | None) -> None:
        """Changes the attention backend; None leaves the choice to us.

        Raises:
            ValueError: unknown, or it can't serve this model here; the present one stays then.
        """
        backend = self._choose_backend(name, self.ops)
        self._attention_wanted = None if self.deterministic else name
        self._forget("engine", "assisted_engine")
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
        ops = self._table(self._kernels_wanted, on)
        backend = self._choose_backend(self._attention_wanted, ops)
        set_kernels(self, ops)
        self._deterministic = on
        self._forget("engine", "assisted_engine")
        self.__dict__["backend"] = backend
        self.destroy_cached_continuous_batching_manager()

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
        self._forget("backend", "engine", "assisted_engine")
        self._select(self._kernels_wanted)

    def _select(self, want: str) -> None:
        set_kernels(self, self._table(want, self.deterministic))

    def _table(self, want: str, deterministic: bool) -> Kernels:
        mode = "train" if self.training else "infer"
        problem = Problem(device=self.device.type, capability=capability(self.device), dtype=self.dtype, mode=mode)
        if want == "triton" and mode == "train":
            want = "auto"  # what has no backward is the reference's in training
        return select(problem, want, deterministic=deterministic)

    def _choose_backend(self, name: str | None, ops: Kernels) -> AttentionBackend:
        if ops.deterministic:
            return deterministic_backend(name, self.attention_problem, ops.chunk_attention)
        return choose_backend(name, self.attention_problem)

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

    @cached_property
    def _batching(self) -> Batching:
        return Batching(self, SizedEngine)

    def generate_batch(
        self,
        inputs: Sequence[Sequence[int]],
        generation_config: GenerationConfig | Sequence[GenerationConfig | None] | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        record_timestamps: bool = False,
        progress_bar: bool = False,
        persistent_manager: bool = False,
        warmup: bool = True,
        *,
        tokenizer: Decodes | None = None,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        **options: Any,
    ) -> dict[str, GenerationOutput]:
        """Continues many prompts, as many of them at once as fit. One call at a time.

        Args:
            inputs: token ids of each prompt, without padding.
            generation_config: options of all prompts, or a list with those of each; None in it takes the checkpoint's.
            continuous_batching_config: options of the engine.
            record_timestamps: note when each token came.
            progress_bar: show requests done, tokens a second and how full the cache is, where stderr is a terminal.
            persistent_manager: keep engine and cache for the next call; `destroy_cached_continuous_batching_manager`
                frees them.
            warmup: prepare what the first steps would otherwise wait for.
            tokenizer: needed by stop_strings.
            logprobs, prompt_logprobs: report log-probabilities, as of the manager's `add_request`.
            options: any field of GenerationConfig; they count most.

        Returns:
            The outputs by request id, in the order of the prompts, each followed by its further answers where
            num_return_sequences asks for some. A prompt that can't run has the status FAILED and the reason in `error`.

        Raises:
            ValueError: an option that does not exist, or options that no prompt can run with.
        """
        return self._batching.generate(
            inputs,
            generation_config,
            continuous_batching_config,
            Terms(
                record_timestamps=record_timestamps,
                tokenizer=tokenizer,
                logprobs=logprobs,
                prompt_logprobs=prompt_logprobs,
            ),
            options,
            progress_bar=progress_bar,
            keep=persistent_manager,
            warmup=warmup,
        )

    def init_continuous_batching(
        self,
        generation_config: GenerationConfig | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        workload_hints: object = None,
    ) -> ContinuousBatchingManager:
        """A manager that takes requests at any time, not yet started; a kept one where there is one that suits.

        Args:
            generation_config: options of all requests, unless they bring their own.
            continuous_batching_config: options of the engine.
            workload_hints: not needed.
        """
        if workload_hints is not None:
            notice("workload_hints has no effect: the engine suits any workload.", once=True)
        return self._batching.manager(generation_config, continuous_batching_config)

    def continuous_batching_context_manager(
        self,
        generation_config: GenerationConfig | None = None,
        block: bool = True,
        timeout: float | None = None,
        continuous_batching_config: ContinuousBatchingConfig | None = None,
        persistent_manager: bool = False,
        warmup: bool = True,
        workload_hints: object = None,
    ) -> AbstractContextManager[ContinuousBatchingManager]:
        """`with` it as a manager: it runs inside the block, at whose end what was submitted is finished.

        Args:
            block: wait for that end, at most `timeout` seconds (None: as long as it takes).
            persistent_manager, warmup: as of `generate_batch`.
            generation_config, continuous_batching_config, workload_hints: as of `init_continuous_batching`.
        """
        manager = self.init_continuous_batching(generation_config, continuous_batching_config, workload_hints)
        return self._batching.running(manager, block=block, timeout=timeout, keep=persistent_manager, warmup=warmup)

    def destroy_cached_continuous_batching_manager(self) -> None:
        """Frees the manager that was kept, its engine and cache."""
        self._batching.destroy_kept()

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
