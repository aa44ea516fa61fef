"""From a checkpoint or a configuration to a model, in one written order; AutoModelForCausalLM."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from cuformers.auto.config import AutoConfig, Name, refuse_remote_code
from cuformers.auto.model import PreTrainedModel, build
from cuformers.auto.placing import place
from cuformers.auto.pretrained import Pretrained
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.checkpoint.index import Index
from cuformers.checkpoint.load import load_weights
from cuformers.checkpoint.materialize import initialize, materialize
from cuformers.checkpoint.placement import DeviceMap, DeviceSpec
from cuformers.checkpoint.plan import some
from cuformers.checkpoint.resolve import folder_patterns, resolve_folder
from cuformers.checkpoint.weight_map import WeightMap
from cuformers.generation.config import GenerationConfig
from cuformers.kernels.hub.config import KernelConfig
from cuformers.models.base_config import BaseConfig
from cuformers.models.registry import find
from cuformers.models.spec import ModelSpec
from cuformers.nn.attention import hub
from cuformers.nn.attention.block import Attention
from cuformers.nn.attention.choose import attention_name
from cuformers.nn.moe import Experts, Router
from cuformers.nn.norm import LayerNorm, RMSNorm
from cuformers.nn.state_space.mixer import Mixer

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
WITHOUT_MEANING = ("low_cpu_mem_usage", "_fast_init", "use_safetensors", "weights_only")
"""Arguments of Transformers whose effect we always have."""
DERIVED = ("*.rotary_emb.inv_freq", "*embeddings.position_ids")
"""Tensors of older checkpoints that are computed from the configuration."""
M = TypeVar("M", bound=Pretrained)


class ModelFactory(Generic[M]):
    """From a checkpoint or a configuration to a model; what differs from kind to kind are the last three methods."""

    def __init__(self) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} makes models with from_pretrained(name_or_path) or from_config(config).")

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Name,
        *,
        config: BaseConfig | None = None,
        dtype: str | torch.dtype = "auto",
        device_map: DeviceMap | None = None,
        max_memory: Mapping[DeviceSpec, int | str] | None = None,
        attn_implementation: str | Mapping[str, str] | None = None,
        kernels: str = "auto",
        deterministic: bool = False,
        use_kernels: bool = False,
        kernel_config: KernelConfig | None = None,
        allow_all_kernels: bool = False,
        generation_config: GenerationConfig | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: Name | None = None,
        local_files_only: bool = False,
        subfolder: str = "",
        variant: str | None = None,
        trust_remote_code: bool = False,
        progress: bool = True,
        **overrides: Any,
    ) -> M:
        """Loads a local folder or a hub id, and puts the model into inference mode.

        Args:
            config: replaces the checkpoint's own.
            dtype: of the weights: "auto" takes the checkpoint's; else "bfloat16", "float16", "float32", or torch's own.
            device_map: "cuda", "cuda:1", 1, "cpu", a torch.device, "auto", or a dict from module to device. None takes
                the GPU where there is one.
            max_memory: bytes to use of each device, for "auto": {0: "20GiB", "cpu": "30GiB"}.
            attn_implementation: attention backend, as `model.set_attn_implementation` says; None takes the config's
                where that can serve the model, and else leaves the choice to us.
            kernels: "auto", "reference" (plain PyTorch) or "triton".
            deterministic: tokens and log-probabilities with the same bits in any batch, as `model.set_deterministic`
                says; it costs speed and needs an NVIDIA GPU.
            use_kernels, kernel_config: layers that other people's kernels compute, as `model.set_use_kernels` says. Our
                own kernels need neither.
            allow_all_kernels: kernels of the hub, attention too, may be of publishers that it does not list as trusted.
            generation_config: replaces the checkpoint's own.
            revision, token, cache_dir, local_files_only, subfolder: where on the hub, as in huggingface_hub.
            variant: reads model.VARIANT.safetensors.
            progress: show a progress bar where stderr is a terminal.
            overrides: values of the configuration that replace the file's.

        Raises:
            CheckpointError: files that are missing, corrupt, or do not fit the model; nothing was loaded then.
            OutOfDeviceMemory: the model does not fit where it should go.
            ValueError: an argument that is unknown or not possible.
        """
        refuse_remote_code(trust_remote_code)
        overrides = _take_aliases(overrides)
        if "torch_dtype" in overrides:
            dtype = overrides.pop("torch_dtype")
        where: dict[str, Any] = dict(
            revision=revision, token=token, cache_dir=cache_dir, local_files_only=local_files_only, subfolder=subfolder
        )
        folder = resolve_folder(pretrained_model_name_or_path, patterns=folder_patterns(variant), **where)
        if config is None:
            config = AutoConfig.from_pretrained(folder, **overrides)
        elif overrides:
            raise ValueError(f"unknown arguments {sorted(overrides)}, as config is given too: set them in the config.")
        index = Index.open(folder, variant)
        spec = find(config.model_type)
        model = cls._build(spec, config, index)
        wanted = _dtype(dtype) or config.dtype or _dtype_of(index)
        placement = place(model, device_map, max_memory, wanted)
        materialize(model, placement.device_of, lambda name: wanted)
        weight_map, left_out = cls._names(spec, index)
        load_weights(model, index, weight_map, ignore_unexpected=(*DERIVED, *left_out), progress=progress)
        if left_out:
            notice(f"left out, as a head's: {some(left_out)}")
        model.follow(placement)
        model.name_or_path = str(pretrained_model_name_or_path)
        cls._read_generation(model, folder, generation_config)
        return _finish(
            model, attn_implementation, kernels, deterministic, use_kernels, kernel_config, allow_all_kernels
        )

    @classmethod
    def from_config(
        cls,
        config: BaseConfig,
        *,
        dtype: str | torch.dtype = "auto",
        device_map: DeviceMap | None = None,
        attn_implementation: str | Mapping[str, str] | None = None,
        kernels: str = "auto",
        deterministic: bool = False,
        use_kernels: bool = False,
        kernel_config: KernelConfig | None = None,
        allow_all_kernels: bool = False,
        seed: int | None = None,
        **unknown: Any,
    ) -> M:
        """A model with random weights, made where they lie; arguments as in `from_pretrained`.

        Args:
            seed: of the weights; None draws one from torch's global generator.
        """
        unknown = _take_aliases(unknown)
        dtype = unknown.pop("torch_dtype", dtype)
        if unknown:
            raise ValueError(f"unknown arguments {sorted(unknown)} of from_config.")
        model = cls._build(find(config.model_type), config, None)
        wanted = _dtype(dtype) or config.dtype or torch.float32
        placement = place(model, device_map, None, wanted)
        materialize(model, placement.device_of, lambda name: wanted)
        if seed is None:
            seed = int(torch.randint(0, 2**63 - 1, ()).item())
        initialize(model, _initializer(config.initializer_range), seed=seed)
        model.follow(placement)
        return _finish(
            model, attn_implementation, kernels, deterministic, use_kernels, kernel_config, allow_all_kernels
        )

    @classmethod
    def _build(cls, spec: ModelSpec, config: BaseConfig, index: Index | None) -> M:
        """The model on the meta device, with what the files have where there are some."""
        raise NotImplementedError

    @classmethod
    def _names(cls, spec: ModelSpec, index: Index) -> tuple[WeightMap, tuple[str, ...]]:
        """The map of the files' names, and names that the model has no place for and may leave out."""
        raise NotImplementedError

    @classmethod
    def _read_generation(cls, model: M, folder: Path, given: GenerationConfig | None) -> None:
        """Sets how the model generates by default, where it does.

        Raises:
            ValueError: something was given, and it doesn't.
        """
        raise NotImplementedError


class AutoModelForCausalLM(ModelFactory[PreTrainedModel]):
    """Makes causal language models; it is never instantiated itself."""

    @classmethod
    def _build(cls, spec: ModelSpec, config: BaseConfig, index: Index | None) -> PreTrainedModel:
        return build(spec, config)

    @classmethod
    def _names(cls, spec: ModelSpec, index: Index) -> tuple[WeightMap, tuple[str, ...]]:
        return spec.weight_map, ()

    @classmethod
    def _read_generation(cls, model: PreTrainedModel, folder: Path, given: GenerationConfig | None) -> None:
        model.generation_config = given or _generation_config(folder, model.config)


def _finish(
    model: M,
    attn_implementation: str | Mapping[str, str] | None,
    kernels: str,
    deterministic: bool,
    use_kernels: bool,
    kernel_config: KernelConfig | None,
    allow_all_kernels: bool,
) -> M:
    model.eval()
    if deterministic:
        model.set_deterministic()
    if attn_implementation is None:
        _attend_as_configured(model)
    else:
        model.set_attn_implementation(attn_implementation, allow_all_kernels)
    if kernels != "auto":
        model.set_kernels(kernels)
    if kernel_config is not None and not use_kernels:
        notice("kernel_config is given, so use_kernels=True.")
        use_kernels = True
    if use_kernels:
        model.set_use_kernels(True, kernel_config, allow_all_kernels=allow_all_kernels)
    return model


def _attend_as_configured(model: Pretrained) -> None:
    """The config's attention where it can serve the model; a checkpoint names no code to fetch and run."""
    wish, name = model.config.attn_implementation, None
    try:
        name = attention_name(wish)
        if name is not None and hub.parse(name) is not None:
            raise ValueError("a hub kernel is taken only where attn_implementation= names it.")
        model.set_attn_implementation(name)
    except ValueError as reason:
        notice(f"config.attn_implementation={wish!r} is passed over: {reason}")
        model.set_attn_implementation(None)


def _take_aliases(arguments: dict[str, Any]) -> dict[str, Any]:
    """Without the arguments whose effect we always have; says so where the user asked for the contrary."""
    for name in WITHOUT_MEANING:
        if arguments.get(name, True) is False:
            raise bad_argument(name, False, "True or nothing", "cuformers always does this.")
    if "torch_dtype" in arguments:
        notice("torch_dtype is the older name of dtype.", once=True)
    return {k: v for k, v in arguments.items() if k not in WITHOUT_MEANING}


def _dtype(value: str | torch.dtype | None) -> torch.dtype | None:
    """The dtype asked for; None for "auto"."""
    if value in ("auto", None):
        return None
    name = str(value).removeprefix("torch.")
    if name not in DTYPES:
        raise bad_argument("dtype", value, f"'auto', one of {sorted(DTYPES)}, or the torch.dtype of that name")
    return DTYPES[name]


def _dtype_of(index: Index) -> torch.dtype:
    """The dtype of a checkpoint whose config does not tell: that of its first floating-point tensor."""
    return next((e.dtype for e in index.entries.values() if e.dtype in DTYPES.values()), torch.float32)


def _generation_config(folder: Path, config: BaseConfig) -> GenerationConfig:
    if (folder / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(folder)
    return GenerationConfig.from_model_config(config.to_dict())


def _initializer(std: float) -> Any:
    def init(name: str, module: nn.Module, generator: torch.Generator) -> None:
        if isinstance(module, RMSNorm):
            module.weight.fill_(1.0 - module.offset)
        elif isinstance(module, LayerNorm):
            module.weight.fill_(1.0)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, Mixer):
            module.initialize(generator)
        elif isinstance(module, nn.Conv1d):
            bound = module.kernel_size[0] ** -0.5
            module.weight.uniform_(-bound, bound, generator=generator)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Linear) and name.endswith(".mixer.dt_proj"):
            pass  # its mixer's work
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            module.weight.normal_(0.0, std, generator=generator)
            if isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, (Router, Experts)):
            for name, parameter in module.named_parameters(recurse=False):
                parameter.zero_() if name.endswith("bias") else parameter.normal_(0.0, std, generator=generator)
        elif isinstance(module, Attention) and module.sinks is not None:
            module.sinks.normal_(0.0, std, generator=generator)

    return init
