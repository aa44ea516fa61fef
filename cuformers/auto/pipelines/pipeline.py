"""`pipeline`: from a task and a checkpoint to something to call."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, overload

import torch

from cuformers.auto.base_model import AutoModel, BaseModel
from cuformers.auto.builtin import builtin_folder
from cuformers.auto.causal_lm import AutoModelForCausalLM, ModelFactory
from cuformers.auto.config import Name
from cuformers.auto.model import PreTrainedModel
from cuformers.auto.pipelines.feature_extraction import FeatureExtractionPipeline
from cuformers.auto.pipelines.text_generation import TextGenerationPipeline
from cuformers.auto.pretrained import Pretrained
from cuformers.auto.tokenizers.tokenizer import AutoTokenizer, Tokenizer
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.cuda.device import resolve_device
from cuformers.models.base_config import BaseConfig

Pipeline = TextGenerationPipeline | FeatureExtractionPipeline


class Task(NamedTuple):
    """What a task is made of."""

    pipeline: Callable[..., Pipeline]
    factory: type[ModelFactory[Any]]
    """Loads its model."""
    model: type[Pretrained]
    """What that makes."""


TASKS = {
    "text-generation": Task(TextGenerationPipeline, AutoModelForCausalLM, PreTrainedModel),
    "feature-extraction": Task(FeatureExtractionPipeline, AutoModel, BaseModel),
}


@overload
def pipeline(task: Literal["feature-extraction"], *args: Any, **options: Any) -> FeatureExtractionPipeline: ...
@overload
def pipeline(task: str | None = None, *args: Any, **options: Any) -> TextGenerationPipeline: ...
def pipeline(
    task: str | None = None,
    model: Name | Pretrained | None = None,
    config: BaseConfig | None = None,
    tokenizer: Name | Tokenizer | None = None,
    *,
    revision: str | None = None,
    token: str | bool | None = None,
    device: int | str | torch.device | None = None,
    device_map: str | int | torch.device | dict[str, Any] | None = None,
    dtype: str | torch.dtype = "auto",
    torch_dtype: str | torch.dtype | None = None,
    trust_remote_code: bool | None = None,
    use_fast: bool = True,
    model_kwargs: Mapping[str, Any] | None = None,
    batch_size: int | None = None,
    **options: Any,
) -> Pipeline:
    """Makes a pipeline: a model and its tokenizer behind one call.

    Args:
        task: "text-generation", which None means too, or "feature-extraction".
        model: a folder, a hub id, or a loaded model; None takes the built-in one, which tells small stories.
        config: replaces the checkpoint's own.
        tokenizer: a folder, a hub id, or a loaded tokenizer; None takes the one beside the model.
        revision, token: where on the hub.
        device: "cuda:1", 1, "cpu", -1 (the CPU). None takes the GPU where there is one, and leaves a loaded model
            where it is.
        device_map: as in `from_pretrained`; not together with `device`.
        dtype: of the weights, as in `from_pretrained`; torch_dtype is its older name.
        model_kwargs: further arguments of `from_pretrained`.
        batch_size: texts that are computed at once. Default 1 for generation, 32 for features.
        options: of TextGenerationPipeline: return_full_text, max_new_tokens, do_sample ...; of
            FeatureExtractionPipeline: return_tensors, truncation, pooling, normalize ...

    Raises:
        ValueError: an unknown task or option, or arguments that contradict each other.
    """
    task = "text-generation" if task is None else task
    if task not in TASKS:
        raise bad_argument("task", task, " or ".join(map(repr, TASKS)), "No other task is supported.")
    make, factory, kind = TASKS[task]
    if not use_fast:
        raise bad_argument("use_fast", use_fast, "True", "Every tokenizer here is a fast one.")
    loading = _loading(model_kwargs or {}, device, device_map, dtype, torch_dtype)
    loading |= {"config": config} if config is not None else {}
    loading |= {"trust_remote_code": True} if trust_remote_code else {}
    if model is not None and not isinstance(model, str | Path | kind):
        allowed = f"a folder, a hub id, or a model loaded by cuformers' {factory.__name__}"
        raise bad_argument("model", type(model).__name__, allowed)
    if model is None:
        if task != "text-generation":
            raise bad_argument("model", None, f"a folder, a hub id, or a loaded model for {task}")
        if tokenizer is not None:
            raise ValueError("tokenizer is given without a model: name the model that it belongs to.")
        model = builtin_folder()
        notice("no model is named: the built-in one is taken, which tells small stories.", once=True)
    hub = {"revision": revision, "token": token}
    tokens = _tokenizer(tokenizer, model, {**_where(loading), **hub})  # before the model, which takes longer
    if task == "feature-extraction":
        options["where"] = {**_where(loading), **hub}
    if isinstance(model, Pretrained):
        model = _placed(model, loading, hub)
    else:
        model = factory.from_pretrained(model, **{**hub, **loading})
    return make(model, tokens, batch_size=batch_size, **options)


def _loading(given: Mapping[str, Any], device: Any, device_map: Any, dtype: Any, torch_dtype: Any) -> dict[str, Any]:
    """Arguments of `from_pretrained`, each of which may come from one side only."""
    loading = dict(given)
    if torch_dtype is not None:
        if dtype != "auto":
            raise ValueError(f"dtype={dtype!r} and torch_dtype={torch_dtype!r} name the same thing: give dtype.")
        notice("torch_dtype is the older name of dtype.", once=True)
        dtype = torch_dtype
    if device is not None and (device_map is not None or "device_map" in loading):
        raise ValueError("device and device_map both say where the model goes: give one of them.")
    if device is not None:
        device_map = "cpu" if device == -1 else device
    for name, value, unset in (("device_map", device_map, None), ("dtype", dtype, "auto")):
        if value is None or value == unset:
            continue
        if name in loading or (name == "dtype" and "torch_dtype" in loading):
            raise ValueError(f"{name} is given to pipeline and in model_kwargs: give it in one place.")
        loading[name] = value
    return loading


def _placed(model: Pretrained, loading: dict[str, Any], hub: dict[str, Any]) -> Pretrained:
    """A loaded model, moved where `device` says; what only loading could do is refused."""
    device = loading.pop("device_map", None)
    left = [*loading, *(name for name, value in hub.items() if value is not None)]
    if left or isinstance(device, dict) or device == "auto":
        names = left or ["device_map"]
        raise ValueError(f"{', '.join(names)} can't be changed on a loaded model: pass it to from_pretrained.")
    if device is not None:
        model.to(resolve_device(device))
    return model


def _tokenizer(tokenizer: Name | Tokenizer | None, model: Name | Pretrained, where: dict[str, Any]) -> Tokenizer:
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is None:
        tokenizer = model.name_or_path if isinstance(model, Pretrained) else model
        if not str(tokenizer):
            raise ValueError("the model was not loaded from a checkpoint, so it has no tokenizer: pass tokenizer=.")
    if not isinstance(tokenizer, str | Path):
        raise bad_argument("tokenizer", tokenizer, "a folder, a hub id, or what AutoTokenizer.from_pretrained returns")
    return AutoTokenizer.from_pretrained(tokenizer, **where)


def _where(loading: Mapping[str, Any]) -> dict[str, Any]:
    names = ("cache_dir", "local_files_only", "subfolder")
    return {name: loading[name] for name in names if name in loading}
