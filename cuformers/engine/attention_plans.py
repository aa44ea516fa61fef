"""How the attention of a step's decoding rows is cut, made once for all layers of a window."""

from torch import Tensor

from cuformers.kernels.attention_plan import AttentionPlan
from cuformers.nn.decoder import CausalLM


def attention_plans(model: CausalLM, lengths: Tensor) -> dict[int | None, AttentionPlan]:
    """The plan of each window of the model's layers, for rows of these lengths [N]; empty without rows."""
    if not lengths.numel():
        return {}
    plan, specs = model.ops.attention_plan, model.model.attention_specs
    windows = dict.fromkeys(spec.window for spec in specs)
    return {window: plan(lengths, num_kv_heads=specs[0].num_kv_heads, window=window) for window in windows}
