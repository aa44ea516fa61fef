"""The managers of a model: made, kept for the next call, and thrown away."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

from cuformers.auto.batching.batch import Configs, read_options, run_batch
from cuformers.auto.batching.engine_like import EngineLike
from cuformers.auto.batching.manager import ContinuousBatchingManager
from cuformers.auto.batching.output import GenerationOutput
from cuformers.auto.batching.submit import Terms
from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.config import GenerationConfig

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel

MakeEngine = Callable[["PreTrainedModel", ContinuousBatchingConfig], EngineLike]


class Batching:
    """Continuous batching of one model; it keeps a manager where the user wants one kept."""

    def __init__(self, model: "PreTrainedModel", make_engine: MakeEngine) -> None:
        self._model, self._make_engine = model, make_engine
        self._kept: ContinuousBatchingManager | None = None

    def manager(
        self, generation_config: GenerationConfig | None = None, config: ContinuousBatchingConfig | None = None
    ) -> ContinuousBatchingManager:
        """The kept manager, where there is one and it suits; else a new one.

        Raises:
            ValueError: no ContinuousBatchingConfig, or no GenerationConfig.
        """
        if config is not None and not isinstance(config, ContinuousBatchingConfig):
            remedy = "Make one with cuformers.ContinuousBatchingConfig(...)."
            raise bad_argument("continuous_batching_config", config, "a ContinuousBatchingConfig, or None", remedy)
        defaults = self._model.generation_config
        kept = self._kept
        if kept is not None and config is not None and config != kept.config:
            notice("the kept manager has another ContinuousBatchingConfig: it makes room for a new one.")
            self.destroy_kept()
            kept = None
        if kept is not None:
            kept.set_options(generation_config, defaults)
            return kept
        model, own, make_engine = self._model, copy(config or ContinuousBatchingConfig()), self._make_engine
        return ContinuousBatchingManager(
            lambda: make_engine(model, own),
            vocab_size=model.config.vocab_size,
            max_positions=model.config.max_position_embeddings,
            defaults=defaults,
            generation_config=generation_config,
            config=own,
        )

    @contextmanager
    def running(
        self,
        manager: ContinuousBatchingManager,
        *,
        block: bool = True,
        timeout: float | None = None,
        keep: bool = False,
        warmup: bool = True,
    ) -> Iterator[ContinuousBatchingManager]:
        """The manager, which runs inside the block. After an error what still runs is cancelled, else finished."""
        manager.start(warmup=warmup)
        self._kept = manager if keep else None
        failed = True
        try:
            yield manager
            failed = False
        finally:
            manager.stop(block, timeout, keep_for_next_session=keep, hard_stop=failed)

    def generate(
        self,
        inputs: Sequence[Any],
        configs: Configs,
        config: ContinuousBatchingConfig | None,
        terms: Terms,
        options: dict[str, Any],
        *,
        progress_bar: bool,
        keep: bool,
        warmup: bool,
    ) -> dict[str, GenerationOutput]:
        """What `generate_batch` does."""
        manager = self.manager(configs if isinstance(configs, GenerationConfig) else None, config)
        asked = read_options(manager, configs, options, len(inputs))
        if not inputs:
            return {}
        with self.running(manager, keep=keep, warmup=warmup):
            return run_batch(manager, inputs, asked, terms, progress_bar=progress_bar)

    def destroy_kept(self) -> None:
        """Frees the kept manager, its engine and cache."""
        if self._kept is not None:
            self._kept.destroy()
            self._kept = None
