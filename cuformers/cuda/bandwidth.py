"""How fast each GPU's memory is, by its makers' data sheets: what decoding one request is bound by."""

from collections.abc import Mapping

import torch

from cuformers.cuda.device import device_name

TERABYTES_PER_SECOND: Mapping[str, float] = {
    "NVIDIA B200": 8.0,
    "NVIDIA GB200": 8.0,
    "NVIDIA H200": 4.8,
    "NVIDIA H200 NVL": 4.8,
    "NVIDIA GH200 144G HBM3e": 4.9,
    "NVIDIA GH200 480GB": 4.0,  # 480 GB is the CPU's memory; the GPU's is 96 GB of HBM3
    "NVIDIA H20": 4.0,
    "NVIDIA H100 NVL": 3.9,
    "NVIDIA H100 80GB HBM3": 3.35,
    "NVIDIA H100 PCIe": 2.0,
    "NVIDIA A100-SXM4-80GB": 2.039,
    "NVIDIA A100 80GB PCIe": 1.935,
    "NVIDIA A100-SXM4-40GB": 1.555,
    "NVIDIA A100-PCIE-40GB": 1.555,
    "NVIDIA A30": 0.933,
    "NVIDIA A40": 0.696,
    "NVIDIA A10": 0.6,
    "NVIDIA A10G": 0.6,
    "NVIDIA L40S": 0.864,
    "NVIDIA L40": 0.864,
    "NVIDIA L4": 0.3,
    "NVIDIA GB10": 0.273,
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": 1.792,
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": 1.597,
    "NVIDIA RTX 6000 Ada Generation": 0.96,
    "NVIDIA RTX A6000": 0.768,
    "NVIDIA GeForce RTX 5090": 1.792,
    "NVIDIA GeForce RTX 5080": 0.96,
    "NVIDIA GeForce RTX 5070 Ti": 0.896,
    "NVIDIA GeForce RTX 4090": 1.008,
    "NVIDIA GeForce RTX 4080 SUPER": 0.736,
    "NVIDIA GeForce RTX 4080": 0.717,
    "NVIDIA GeForce RTX 3090 Ti": 1.008,
    "NVIDIA GeForce RTX 3090": 0.936,
}
"""By the name that the driver gives a whole GPU; a MIG slice has another name, and less."""


def memory_bandwidth(device: torch.device | str | int) -> float | None:
    """Bytes per second between a GPU's memory and its processors; None where no figure is known, as for the CPU."""
    terabytes = TERABYTES_PER_SECOND.get(device_name(device))
    return None if terabytes is None else terabytes * 1e12
