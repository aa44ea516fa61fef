"""Fields of Transformers' TrainingArguments that cuformers knows by name and lacks: what is neutral, and why."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cuformers.base.log import notice


@dataclass(frozen=True)
class Refused:
    """One field of Transformers' TrainingArguments that is not honoured here."""

    default: Any
    """Transformers' default, which asks for nothing."""
    reason: str
    """Why not, or what to do instead, as a sentence."""
    neutral: tuple[Any, ...] = ()
    """Other values that ask for nothing."""
    inert: bool = False
    """True: it changes no weight and no number, so that another value gets a notice instead of an error."""


_HALF = "Float16 would need scaled losses; use bf16=True, which has float32's range."
_MEMORY = "Activations are kept: a smaller batch with more gradient_accumulation_steps takes less memory."
_COMPILE = "The model runs on kernels of its own; leave it out."
_ONE = "Training runs in one process on one GPU; leave it out."
_HUB = "Nothing is uploaded; use save_model and the huggingface_hub command line."
_LOGGERS = "No logger is built in; pass a TrainerCallback with on_log."
_LEVELS = "Notices go to stderr; CUFORMERS_QUIET=1 silences them."
_METRICS = "compute_metrics gets the predictions and labels of the whole data set."
_OPTIMIZER = "Pass an optimizer of your own: Trainer(optimizers=(optimizer, scheduler))."

REFUSED: Mapping[str, Refused] = {
    "optim_args": Refused(None, _OPTIMIZER),
    "optim_target_modules": Refused(None, _OPTIMIZER),
    "average_tokens_across_devices": Refused(True, _ONE, (False,)),
    "label_smoothing_factor": Refused(0.0, "Pass compute_loss_func."),
    "fp16": Refused(False, _HALF),
    "fp16_full_eval": Refused(False, "Evaluation runs in the model's dtype; cast the model itself."),
    "bf16_full_eval": Refused(False, "Evaluation runs in the model's dtype; cast the model itself."),
    "tf32": Refused(None, "torch.backends is yours: set torch.backends.cuda.matmul.allow_tf32."),
    "gradient_checkpointing": Refused(False, _MEMORY),
    "gradient_checkpointing_kwargs": Refused(None, _MEMORY),
    "torch_compile": Refused(False, _COMPILE),
    "torch_compile_backend": Refused(None, _COMPILE),
    "torch_compile_mode": Refused(None, _COMPILE),
    "use_liger_kernel": Refused(False, "Load the model with use_kernels=True and a kernel_config of Liger's layers."),
    "liger_kernel_config": Refused(None, "Load the model with use_kernels=True and a kernel_config of Liger's layers."),
    "use_cache": Refused(False, "Training needs no cache."),
    "neftune_noise_alpha": Refused(None, "Add the noise in a forward hook on the embedding."),
    "torch_empty_cache_steps": Refused(None, "PyTorch's allocator reuses its memory; leave it out."),
    "auto_find_batch_size": Refused(False, "Give per_device_train_batch_size."),
    "log_on_each_node": Refused(True, _ONE, (False,)),
    "logging_nan_inf_filter": Refused(True, "nan_policy says what becomes of steps that aren't finite."),
    "include_num_input_tokens_seen": Refused("no", "Count them in a data collator of your own.", (False,)),
    "log_level": Refused("passive", _LEVELS, inert=True),
    "log_level_replica": Refused("warning", _LEVELS, inert=True),
    "disable_tqdm": Refused(None, "There is no progress bar; logs are printed.", (True,), inert=True),
    "report_to": Refused("none", _LOGGERS, (None, [], ["none"])),
    "run_name": Refused(None, _LOGGERS, inert=True),
    "project": Refused("huggingface", _LOGGERS, inert=True),
    "trackio_space_id": Refused(None, _LOGGERS),
    "trackio_bucket_id": Refused(None, _LOGGERS),
    "trackio_static_space_id": Refused(None, _LOGGERS, (False,)),
    "eval_do_concat_batches": Refused(True, _METRICS),
    "eval_use_gather_object": Refused(False, _ONE),
    "include_for_metrics": Refused([], _METRICS, (None, ())),
    "batch_eval_metrics": Refused(False, "preprocess_logits_for_metrics makes what is kept of each batch small."),
    "save_on_each_node": Refused(False, _ONE),
    "enable_jit_checkpoint": Refused(False, "A killed run resumes from its last checkpoint."),
    "push_to_hub": Refused(False, _HUB),
    "hub_token": Refused(None, _HUB),
    "hub_private_repo": Refused(None, _HUB),
    "hub_model_id": Refused(None, _HUB),
    "hub_strategy": Refused("every_save", _HUB),
    "hub_always_push": Refused(False, _HUB),
    "hub_revision": Refused(None, _HUB),
    "ignore_data_skip": Refused(False, "A resumed run goes on at its place in the data; a map is not read again."),
    "full_determinism": Refused(False, "torch.use_deterministic_algorithms is yours to call."),
    "accelerator_config": Refused(None, _ONE),
    "parallelism_config": Refused(None, _ONE),
    "dataloader_in_order": Refused(True, "Batches come in order, so that a run can be repeated."),
    "length_column_name": Refused("length", "Batches are not grouped by length.", inert=True),
    "ddp_find_unused_parameters": Refused(None, _ONE),
    "ddp_bucket_cap_mb": Refused(None, _ONE),
    "ddp_broadcast_buffers": Refused(None, _ONE),
    "ddp_static_graph": Refused(None, _ONE),
    "ddp_backend": Refused(None, _ONE),
    "ddp_timeout": Refused(1800, _ONE, inert=True),
    "fsdp": Refused(None, _ONE, (False, "", [])),
    "fsdp_config": Refused(None, _ONE),
    "deepspeed": Refused(None, _ONE),
    "debug": Refused("", "There is nothing to debug by name; use torch's own tools.", ([],)),
    "skip_memory_metrics": Refused(True, "Ask torch for its memory statistics in a TrainerCallback."),
    "local_rank": Refused(-1, _ONE, (0,)),
}
"""Every field of Transformers 5.17's TrainingArguments that TrainingArguments here does not have."""


def check_refused(options: Mapping[str, object]) -> None:
    """Raises ValueError for a field of the table that asks for something; one notice where it changes nothing."""
    for name, value in options.items():
        entry = REFUSED[name]
        neutral = (entry.default, *entry.neutral)
        if any(value == one and type(value) is type(one) for one in neutral):
            continue
        if not entry.inert:
            allowed = " or ".join(repr(one) for one in neutral)
            raise ValueError(f"{name}={value!r} is not supported: allowed is {allowed}. {entry.reason}")
        notice(f"{name}={value!r} has no effect. {entry.reason}", once=True)
