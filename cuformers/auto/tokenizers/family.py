"""What a tokenizer's class name stands for: default special tokens, padding side, names of the model's inputs.

`tokenizer.json` is the specification of a tokenizer. The class that `tokenizer_config.json` (or the model's type)
names adds defaults for what the files leave out, and for a few families one change of the pipeline
(`tokenizer_pipeline.py`). Which class holds follows Transformers 5.17's AutoTokenizer.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

PLAIN = ("input_ids", "attention_mask")
PAIRED = ("input_ids", "token_type_ids", "attention_mask")


class Family(NamedTuple):
    """The defaults of one tokenizer class."""

    name: str
    special_tokens: Mapping[str, str] = {}
    padding_side: str = "right"
    model_input_names: tuple[str, ...] = PLAIN


GENERIC = Family("TokenizersBackend")
_ENDOFTEXT = "<|endoftext|>"
_BERT = {f"{name}_token": f"[{name.upper()}]" for name in ("unk", "sep", "pad", "cls", "mask")}
_FAMILIES = (
    Family("LlamaTokenizer", {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}, "left"),
    Family(
        "GemmaTokenizer",
        {
            name: f"<{name.removesuffix('_token')}>"
            for name in ("unk_token", "bos_token", "eos_token", "pad_token", "mask_token")
        },
        "left",
    ),
    Family("GPT2Tokenizer", dict.fromkeys(("unk_token", "bos_token", "eos_token"), _ENDOFTEXT)),
    Family("Qwen2Tokenizer", dict.fromkeys(("unk_token", "eos_token", "pad_token"), _ENDOFTEXT)),
    Family(
        "GPTNeoXTokenizer",
        {**dict.fromkeys(("unk_token", "bos_token", "eos_token"), _ENDOFTEXT), "pad_token": "<|padding|>"},
    ),
    Family("BertTokenizer", _BERT, model_input_names=PAIRED),
    Family(
        "CohereTokenizer",
        {
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
        "left",
    ),
)
FAMILIES = {family.name: family for family in _FAMILIES}

# The class that belongs to a model's type, where the files name none or name another one.
_OF_MODEL_TYPE = {
    "GemmaTokenizer": "gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text recurrent_gemma shieldgemma2 t5gemma zaya",
    "GPT2Tokenizer": "codegen dbrx emu3 gpt2 gpt_neo gptj jais2 opt phi starcoder2",
    "Qwen2Tokenizer": "internvl ovis2 qwen2 qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next "
    "qwen3_vl qwen3_vl_moe",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "BertTokenizer": "bert convbert distilbert electra ernie git layoutlm megatron-bert nomic_bert visual_bert",
    "CohereTokenizer": "aya_vision cohere cohere2",
    # tokenizer.json alone speaks for these, whatever class their files name
    "TokenizersBackend": "arctic chameleon deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 deepseek_vl ernie4_5 "
    "ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite gpt_bigcode granite granitemoe granitemoehybrid "
    "granitemoeshared hyperclovax internlm2 jamba janus kimi_k25 kimi_linear llava llava_next mimo_v2_flash minicpm3 "
    "minicpmv minimax_m2 ministral ministral3 mistral mistral3 mixtral modernbert molmo nemotron olmo2 olmo3 "
    "olmo_hybrid persimmon phi3 phi3_v phimoe pixtral smolvlm stablelm step3p5 vipllava voxtral",
}
_CLASS_OF = {model_type: name for name, types in _OF_MODEL_TYPE.items() for model_type in types.split()}
_CLASS_OVERRULES_FILES = frozenset(("qwen2",))  # published with wrong class names


def choose_family(tokenizer_config: Mapping[str, Any], model_config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint, from `tokenizer_config.json` and `config.json` (either may be empty)."""
    named = tokenizer_config.get("tokenizer_class") or model_config.get("tokenizer_class")
    named = named.removesuffix("Fast") if isinstance(named, str) else None
    model_type = model_config.get("model_type")
    expected = _CLASS_OF.get(model_type) if isinstance(model_type, str) else None
    if named is None:
        return FAMILIES.get(expected or "", GENERIC)
    if expected is None or expected == named:
        return FAMILIES.get(named, GENERIC)
    if expected == GENERIC.name:
        return GENERIC
    return FAMILIES.get(expected if model_type in _CLASS_OVERRULES_FILES else named, GENERIC)
