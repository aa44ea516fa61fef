"""LoRA (arXiv 2106.09685) with PEFT's names and files.

    config.py    LoraConfig: what to adapt and how
    targets.py   which of a model's modules that means
    state.py     which adapters a model has, and which count now
    layer.py     a linear map with adapters
    inject.py    adapters into a model and out of it
    merge.py     adapters into the weights and out of them
    peft_file.py adapter_config.json and adapter_model.safetensors
"""
