"""A model's adapters: LoRA with the names of PEFT and of Transformers' models."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Self, TypeVar

from cuformers.adapters import inject
from cuformers.adapters.config import LoraConfig
from cuformers.adapters.merge import merge, unmerge
from cuformers.adapters.peft_file import FILES, read_adapter, save_adapter
from cuformers.adapters.state import AdapterState
from cuformers.auto.computing import Computing
from cuformers.base.errors import bad_argument
from cuformers.checkpoint.resolve import resolve_folder
from cuformers.checkpoint.weight_map import WeightMap
from cuformers.nn.offload import Offload


class Adapting(Computing):
    """A model that takes adapters, which come, go and change without touching its own weights until they are merged."""

    name_or_path: str
    peft_config: dict[str, LoraConfig]
    """Each adapter's configuration, by name; absent without adapters, as PEFT sets it on the models that it wraps."""

    @property
    def saved_as(self) -> WeightMap:
        """Names of the weights in the file that a save writes."""
        raise NotImplementedError

    @cached_property
    def adapters(self) -> AdapterState:
        """Which adapters there are, and which count."""
        return AdapterState()

    @property
    def active_adapters(self) -> list[str]:
        """Names of the adapters that count, unless they are disabled."""
        return list(self.adapters.active)

    def add_adapter(
        self, adapter_config: LoraConfig, adapter_name: str = "default", *, autocast_adapter_dtype: bool = True
    ) -> None:
        """Gives the model a new adapter, the only active one then; all other weights are frozen.

        Args:
            autocast_adapter_dtype: A and B are kept in float32 where the model has 16 bits. Products with them are
                computed in the model's dtype all the same.

        Raises:
            ValueError: a name that is taken, target_modules that the model has not; nothing was changed then.
        """
        self._check_in_place()
        base = adapter_config.base_model_name_or_path or self.name_or_path
        config = replace(adapter_config, base_model_name_or_path=base)
        inject.add_adapter(self, self.adapters, config, adapter_name, autocast=autocast_adapter_dtype)
        self.peft_config = self.adapters.configs

    def load_adapter(
        self,
        peft_model_id: str | Path,
        adapter_name: str = "default",
        *,
        is_trainable: bool = False,
        autocast_adapter_dtype: bool = True,
        revision: str | None = None,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        subfolder: str = "",
    ) -> None:
        """Reads an adapter that PEFT or `save_pretrained` wrote; it is the only active one then.

        Args:
            peft_model_id: a local folder or a hub id.
            is_trainable: train it on.
            autocast_adapter_dtype: as of `add_adapter`.

        Raises:
            CheckpointError: files that are missing, corrupt, or do not fit; all faults at once, nothing was changed.
            ValueError: a name that is taken, another method than LoRA, options that are not possible here.
        """
        self._check_in_place()
        inject.check_name(self.adapters, adapter_name)
        folder = resolve_folder(
            peft_model_id,
            patterns=FILES,
            revision=revision,
            token=token,
            cache_dir=cache_dir,
            local_files_only=local_files_only,
            subfolder=subfolder,
        )
        config, targets, tensors = read_adapter(self, folder, self.saved_as)
        config = replace(config, inference_mode=not is_trainable)
        inject.add_adapter(
            self,
            self.adapters,
            config,
            adapter_name,
            targets=targets,
            tensors=tensors,
            autocast=autocast_adapter_dtype,
        )
        self.peft_config = self.adapters.configs

    def set_adapter(self, adapter_name: str | Sequence[str]) -> None:
        """Makes one adapter active, or several, whose products are added up; only these are trained."""
        inject.activate(self, self.adapters, inject.known(self.adapters, adapter_name))

    def disable_adapters(self) -> None:
        """The model computes as without adapters, until `enable_adapters`."""
        inject.enable(self.adapters, False)

    def enable_adapters(self) -> None:
        """The active adapters count again."""
        inject.enable(self.adapters, True)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Inside the `with` block the model computes as without adapters."""
        before = self.adapters.enabled
        inject.enable(self.adapters, False)
        try:
            yield
        finally:
            inject.enable(self.adapters, before)

    def delete_adapter(self, adapter_name: str) -> None:
        """Takes an adapter out of the model."""
        inject.delete_adapter(self, self.adapters, adapter_name)
        if not self.adapters.configs:
            del self.peft_config

    def merge_adapter(self, adapter_names: Sequence[str] | None = None) -> None:
        """Adds adapters (None: the active ones) to the weights, so that they cost no time, until `unmerge_adapter`.

        The weights before are kept in the host's memory.

        Raises:
            ValueError: some are merged already, a weight is the embedding's too, or values are not finite; nothing was
                changed then.
        """
        merge(self, self.adapters, self._named_or_active(adapter_names), keep=True)

    def unmerge_adapter(self) -> None:
        """Gives the weights the bits that they had before `merge_adapter`."""
        unmerge(self, self.adapters)

    def merge_and_unload(self, adapter_names: Sequence[str] | None = None) -> Self:
        """Adds adapters (None: the active ones) to the weights for good, and takes all out; returns the model."""
        if not self.adapters.merged:
            merge(self, self.adapters, self._named_or_active(adapter_names), keep=False)
        elif adapter_names is not None and tuple(adapter_names) != self.adapters.merged:
            allowed = f"{list(self.adapters.merged)}, which are merged already"
            raise bad_argument("adapter_names", adapter_names, allowed)
        return self._unloaded()

    def unload(self) -> Self:
        """Takes all adapters out, merged ones too; returns the model itself."""
        if self.adapters.merged:
            self.unmerge_adapter()
        return self._unloaded()

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Weights that are trained, and all weights, tied ones once."""
        sizes = [(p.numel(), p.requires_grad) for p in self.parameters()]
        return sum(n for n, trained in sizes if trained), sum(n for n, _ in sizes)

    def save_adapters(self, folder: str | Path, names: Sequence[str] | None = None) -> None:
        """Writes adapters (None: all) for PEFT: "default" into the folder, others into folders of their names."""
        for name in inject.known(self.adapters, tuple(self.adapters.configs) if names is None else names):
            save_adapter(self, name, self.adapters.configs[name], _place(folder, name), self.saved_as)

    @property
    def has_adapters(self) -> bool:
        """Whether there are any, which are then all that a save writes."""
        return bool(self.adapters.configs)

    def restore_adapters(self, folder: str | Path) -> None:
        """Fills all adapters from where `save_adapters` wrote them.

        Raises:
            CheckpointError: files that are missing, corrupt, or another adapter's; nothing was changed then.
        """
        read = {
            name: read_adapter(self, _place(folder, name), self.saved_as).tensors for name in self.adapters.configs
        }
        inject.refill(self, self.adapters, read)

    def _named_or_active(self, names: Sequence[str] | None) -> tuple[str, ...]:
        return inject.known(self.adapters, self.adapters.active if names is None else names)

    def _unloaded(self) -> Self:
        inject.unload(self, self.adapters)
        if "peft_config" in vars(self):
            del self.peft_config
        return self

    def _check_in_place(self) -> None:
        if any(isinstance(mover, Offload) for mover in self._movers):
            raise ValueError("a model with layers on the CPU beside a GPU takes no adapters: load it onto GPUs alone.")


def _place(folder: str | Path, name: str) -> Path:
    """Where an adapter is saved."""
    return Path(folder) if name == "default" else Path(folder) / name


A = TypeVar("A", bound=Adapting)


def get_peft_model(model: A, peft_config: LoraConfig, adapter_name: str = "default", **options: bool) -> A:
    """Gives a model an adapter to be trained, as `Adapting.add_adapter` says; returns the model itself, no wrapper."""
    model.add_adapter(peft_config, adapter_name, **options)
    return model
