"""What the configurations of state-space models share."""

import math
from dataclasses import dataclass
from typing import Any, ClassVar

from cuformers.base.errors import bad_argument
from cuformers.models.base_config import BaseConfig

ABSENT = ("num_attention_heads", "max_position_embeddings")
"""Fields of all configurations that these files do not have: no attention, and no longest sequence."""


@dataclass(kw_only=True)
class StateSpaceConfig(BaseConfig):
    """The configuration of a stack of mixers."""

    harmless: ClassVar[frozenset[str]] = frozenset({
        "chunk_size", "conv_bias", "d_inner", "d_model", "fused_add_norm", "n_layer", "pad_vocab_size_multiple",
        "rescale_prenorm_residual", "rms_norm", "ssm_cfg", "time_step_floor", "time_step_init_scheme", "time_step_max",
        "time_step_min", "time_step_scale", "use_associative_scan", "use_falcon_mambapy", "use_mambapy",
    })  # fmt: skip
    """How a new model's weights are drawn, how others compute, and other names of what has a field here."""

    hidden_size: int = 768
    bos_token_id: int | None = 0
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = 0
    initializer_range: float = 0.1
    state_size: int = 16
    """Numbers in the state of a channel."""
    expand: int | float = 2
    """Channels of a mixer, as a multiple of hidden_size."""
    conv_kernel: int = 4
    """Tokens that the convolution sees."""
    use_bias: bool = False
    """Biases of a mixer's first and last projection."""
    use_conv_bias: bool = True
    """Biases of the convolution."""
    hidden_act: str = "silu"
    """Activation after the convolution, and of the gate."""
    layer_norm_epsilon: float = 1e-5
    """Added to the mean square before the root."""
    residual_in_fp32: bool = True
    """The residual stream is float32 in a model of any dtype."""
    time_step_rank: int | str = "auto"
    """Inner width of the step's projection; "auto" is a sixteenth of hidden_size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.intermediate_size = int(self.expand * self.hidden_size)
        if self.time_step_rank == "auto":
            self.time_step_rank = math.ceil(self.hidden_size / 16)
        if not isinstance(self.time_step_rank, int):
            raise bad_argument("config.time_step_rank", self.time_step_rank, "'auto' or a number", "Check config.json.")
        if self.hidden_act != "silu":
            raise bad_argument("config.hidden_act", self.hidden_act, "'silu' in a state-space model")

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in super().to_dict().items() if key not in ABSENT}
