"""LogitsProcessor and LogitsProcessorList: Transformers' interface for changing scores before a token is chosen."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor

from cuformers.generation.rows import Rows


class LogitsProcessor:
    """Changes scores, given the tokens so far. Subclass it and define `__call__` for one of your own."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """
        Args:
            input_ids: [B, L] int64, prompts and answers so far.
            scores: [B, V] fp32, logits as the processors before left them.

        Returns:
            The new scores [B, V].
        """
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(input_ids, scores).")


class RowProcessor(LogitsProcessor, ABC):
    """A processor that also takes ragged rows, as the engine keeps them. Never waits for the device."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return self.process(Rows(input_ids), scores)

    @abstractmethod
    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """The new scores [B, V] for rows of any lengths."""


class LogitsProcessorList(list):
    """Applies its processors one after the other."""

    def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: Any) -> Tensor:
        """A processor that takes more than two arguments gets them from `kwargs`.

        Raises:
            ValueError: a processor wants an argument that `kwargs` lacks.
        """
        for processor in self:
            scores = processor(input_ids, scores, **_wanted(processor, kwargs))
        return scores

    def process(self, rows: Rows, scores: Tensor) -> Tensor:
        """Applies the processors to rows of any lengths.

        Raises:
            ValueError: the rows are ragged and a processor only takes rectangular ones.
        """
        for processor in self:
            if isinstance(processor, RowProcessor):
                scores = processor.process(rows, scores)
            elif rows.lengths is None:
                scores = processor(rows.ids, scores)
            else:
                raise ValueError(
                    f"{type(processor).__name__} takes rectangular input_ids, but the rows differ in length. "
                    "Derive it from RowProcessor, or pad the rows to one length."
                )
        return scores


def _wanted(processor: Callable[..., Tensor], kwargs: dict[str, Any]) -> dict[str, Any]:
    more = list(inspect.signature(processor).parameters.values())[2:]
    if any(p.kind is p.VAR_KEYWORD for p in more):
        return kwargs
    missing = [p.name for p in more if p.default is p.empty and p.name not in kwargs]
    if missing:
        raise ValueError(f"{type(processor).__name__} needs the arguments {missing}: pass them to the list's call.")
    return {p.name: kwargs[p.name] for p in more if p.name in kwargs}
