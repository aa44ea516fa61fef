"""KernelConfig: which layers of a model come from the Kernel Hub."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from cuformers.base.errors import bad_argument
from cuformers.kernels.hub.layers import check_name
from cuformers.kernels.hub.rules import Rule, parse_rules
from cuformers.kernels.hub.source import Source

Rules = tuple[tuple[str, tuple[Rule, ...]], ...]


@dataclass(frozen=True)
class KernelConfig:
    """Layers that other people's kernels compute, in the forms that Transformers takes.

        KernelConfig({"RMSNorm": "kernels-community/liger-kernels:LigerRMSNorm"})
        KernelConfig({"RMSNorm": ("org/repo:Layer", {"version": 2, "trust_remote_code": True})})
        KernelConfig({"SiLU": {"cuda": ("org/repo:Layer", {"revision": "v2.1.0"})}})
        KernelConfig({"RMSNorm": {"cuda": {Mode.TRAINING: "org/repo:A", Mode.INFERENCE: "org/repo:B"}}})
        KernelConfig({"RMSNorm": "/folder/of/a/kernel:Layer"}, use_local_kernel=True)
        KernelConfig({"RMSNorm": ""})

    An entry without a device counts wherever the model is; without a mode in both modes, in training where the layer
    has a backward pass. A form without version takes version 1. "org/repo@v2.1.0:Layer" names a revision and
    "org/repo@>=2.0,<3.0:Layer" the newest version in a range. "" has the layer computed in plain PyTorch. Layers that
    are not named keep our own kernels.

    Raises:
        ValueError: a layer that can't be replaced here, or a form that is unknown.
    """

    kernel_mapping: Mapping[str, Any] = field(default_factory=dict)
    """Layer -> source, by device and mode where given. A layer's name is Transformers' (RMSNorm, SiLU, ...)."""
    use_local_kernel: bool = False
    """Sources are folders on this machine."""
    inherit_mapping: bool = True
    """In Transformers, whether the hub's default mapping serves the other layers. Here our own kernels do, always."""
    rules: Rules = field(init=False, repr=False)
    """The mapping, read."""

    def __post_init__(self) -> None:
        mapping = {} if self.kernel_mapping is None else self.kernel_mapping
        if not isinstance(mapping, Mapping):
            raise bad_argument("kernel_mapping", mapping, "a dict from layer to source: {'RMSNorm': 'org/repo:Layer'}")
        for name in ("use_local_kernel", "inherit_mapping"):
            if not isinstance(getattr(self, name), bool):
                raise bad_argument(name, getattr(self, name), "True or False")
        rules = []
        for layer, value in mapping.items():
            check_name(layer)
            rules.append((layer, parse_rules(layer, value, local=self.use_local_kernel)))
        object.__setattr__(self, "kernel_mapping", dict(mapping))
        object.__setattr__(self, "rules", tuple(rules))

    def trusting(self) -> "KernelConfig":
        """The same with every publisher trusted."""
        trusted = replace(self)
        object.__setattr__(trusted, "rules", tuple((layer, tuple(map(_trust, rules))) for layer, rules in self.rules))
        return trusted


def _trust(rule: Rule) -> Rule:
    if not isinstance(rule.source, Source):
        return rule
    return replace(rule, source=replace(rule.source, trust_remote_code=True))
