"""What requests are to run with: the options of a call over those of the manager and the checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cuformers.base.errors import bad_argument
from cuformers.generation.config import FIELDS, GenerationConfig, unknown_option
from cuformers.generation.resolved import ResolvedGeneration
from cuformers.generation.resolving import resolve
from cuformers.generation.unsupported import UNSUPPORTED

_KEPT_SCORES = ("output_scores", "output_logits")
_OUTPUTS: Mapping[str, Any] = {"return_dict_in_generate": True, **dict.fromkeys(_KEPT_SCORES)}
"""An output of ours is always an object, and never holds scores."""


def check_names(options: Mapping[str, Any]) -> None:
    """Raises ValueError for an option that does not exist, which is a fault of the program and of no request."""
    for name in options:
        if name not in FIELDS and name not in UNSUPPORTED:
            raise unknown_option(name)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options that some requests share, resolved once for each length of a prompt."""

    config: GenerationConfig | None
    """What was passed as generation_config."""
    defaults: GenerationConfig
    """The checkpoint's."""
    given: Mapping[str, Any]
    """Options by name; they count most."""
    max_positions: int | None
    """The model's longest text, which bounds the default length only."""
    _resolved: dict[int, ResolvedGeneration] = field(default_factory=dict, init=False, repr=False, compare=False)

    def resolved(self, prompt_length: int) -> ResolvedGeneration:
        """The options of a request.

        Raises:
            ValueError: an impossible or unsupported option, or one that this prompt does not fit.
        """
        found = self._resolved.get(prompt_length)
        if found is None:
            self._check_outputs()
            found = resolve(
                self.config,
                self.defaults,
                {**self.given, **_OUTPUTS},
                prompt_length,
                max_positions=self.max_positions,
            )
            if found.num_beams > 1:
                raise bad_argument("num_beams", found.num_beams, "1 in continuous batching", "Use generate.")
            self._resolved[prompt_length] = found
        return found

    def _check_outputs(self) -> None:
        said = {**(self.config.to_diff_dict() if self.config is not None else {}), **self.given}
        for name in _KEPT_SCORES:
            if said.get(name):
                remedy = "Use generate, or output_logprobs=True for the log-probabilities of the generated tokens."
                raise bad_argument(name, True, "False or None in continuous batching", remedy)
