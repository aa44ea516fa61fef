"""A model's methods for continuous batching, with Transformers' names."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

from cuformers.auto.batching.manager import ContinuousBatchingManager
from cuformers.auto.batching.output import GenerationOutput
from cuformers.auto.batching.session import Batching
from cuformers.auto.batching.sized_engine import SizedEngine
from cuformers.auto.batching.submit import Terms
from cuformers.base.log import notice
from cuformers.generation.batching_config import ContinuousBatchingConfig
from cuformers.generation.config import GenerationConfig
from cuformers.generation.stopping import Decodes

if TYPE_CHECKING:
    from cuformers.auto.model import PreTrainedModel


class BatchedGeneration:
    """The part of a model that generates for many requests."""

    @cached_property
    def _batching(self) -> Batching:
        return Batching(cast("PreTrainedModel", self), SizedEngine)

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
