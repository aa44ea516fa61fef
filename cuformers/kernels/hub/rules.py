"""One line of a KernelConfig: for which device and mode a layer comes from where."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Flag
from typing import Any

from cuformers.base.errors import bad_argument
from cuformers.kernels.hub.source import LayerSource, hub_source, local_source
from cuformers.kernels.op import Problem

ANY_MODE = "FALLBACK"
ORDER = {
    "infer": ("INFERENCE", "INFERENCE|TORCH_COMPILE", "TRAINING", "TRAINING|TORCH_COMPILE", ANY_MODE),
    "train": ("TRAINING", "TRAINING|TORCH_COMPILE", ANY_MODE),
}
"""Modes that a rule may name, best first, for a model's mode: the order of the package `kernels`."""
MODES = ORDER["infer"]
DEVICES = ("cuda", "cpu", "rocm", "xpu", "npu", "neuron", "tpu", "mps", "metal")
"""Device types that a mapping may name; all but the first two never match here."""
METADATA = ("version", "revision", "trust_remote_code")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One source, and where it counts."""

    device: str | None
    """Device type; None for whatever the model is on."""
    capabilities: tuple[int, int] | None = None
    """Least and greatest compute capability as 10 * major + minor; None for all."""
    mode: str = ANY_MODE
    """One of MODES."""
    source: LayerSource | None
    """None switches the layer's kernels off: it is computed in plain PyTorch."""

    def fits(self, problem: Problem) -> bool:
        """Whether device and capability are those of the problem."""
        if self.device not in (None, problem.device):
            return False
        if self.capabilities is None:
            return True
        if problem.capability is None:
            return False
        major, minor = problem.capability
        return self.capabilities[0] <= 10 * major + minor <= self.capabilities[1]

    @property
    def width(self) -> float:
        """How many capabilities it serves: the rule made for fewest counts."""
        return float("inf") if self.capabilities is None else self.capabilities[1] - self.capabilities[0]


def find(rules: tuple[Rule, ...], problem: Problem) -> Rule | str:
    """The rule that counts for a problem, or the reason why none does."""
    fitting = [rule for rule in rules if rule.fits(problem)]
    if not fitting:
        devices = sorted({str(rule.device) for rule in rules})
        return f"mapped for {', '.join(devices)} only, the model is on {problem.device}"
    narrowest = min(rule.width for rule in fitting)
    by_mode = {rule.mode: rule for rule in fitting if rule.width == narrowest}
    for mode in ORDER[problem.mode]:
        if mode in by_mode:
            return by_mode[mode]
    return f"mapped for {', '.join(sorted(by_mode))} only"


def parse_rules(layer: str, value: Any, *, local: bool) -> tuple[Rule, ...]:
    """The rules of one entry of the mapping.

    Raises:
        ValueError: a form that is unknown; the message shows those that are known.
    """
    if not isinstance(value, Mapping):
        return (Rule(device=None, source=_source(layer, value, local)),)
    if not value:
        raise bad_argument(f"kernel_mapping[{layer!r}]", value, "at least one device", "'' switches a layer off.")
    return tuple(_by_device_or_mode(layer, value, local))


def _by_device_or_mode(layer: str, value: Mapping[Any, Any], local: bool) -> Iterator[Rule]:
    for key, inner in value.items():
        if (mode := _mode(key)) is not None:
            yield Rule(device=None, mode=mode, source=_source(layer, inner, local))
            continue
        device, capabilities = _device(layer, key)
        for inner_key, source in inner.items() if isinstance(inner, Mapping) else [(ANY_MODE, inner)]:
            mode = _mode(inner_key)
            if mode is None:
                raise bad_argument(f"mode of {layer!r}", inner_key, f"a kernels.Mode, or one of {list(MODES)}")
            yield Rule(device=device, capabilities=capabilities, mode=mode, source=_source(layer, source, local))


def _mode(key: object) -> str | None:
    """The mode that a key names, a `kernels.Mode` or its name; None where it names none."""
    name = key.name if isinstance(key, Flag) else key
    if not isinstance(name, str):
        return None
    for mode in MODES:
        if set(mode.split("|")) == set(name.replace(" ", "").split("|")):
            return mode
    return None


def _device(layer: str, key: Any) -> tuple[str, tuple[int, int] | None]:
    """From a device type, or a `kernels.Device`, which may bound the capability."""
    name = key if isinstance(key, str) else getattr(key, "type", None)
    if name not in DEVICES:
        raise bad_argument(f"device of {layer!r}", key, f"one of {list(DEVICES)}")
    properties = None if isinstance(key, str) else getattr(key, "properties", None)
    if properties is None:
        return name, None
    return name, (properties.min_capability, properties.max_capability)


def _source(layer: str, value: Any, local: bool) -> LayerSource | None:
    if value is None or value == "":
        return None
    if isinstance(value, str):
        return local_source(value) if local else hub_source(value)
    if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], str):
        return _described(layer, *value, local=local)
    if isinstance(value, LayerSource) and not isinstance(value, type):
        return value
    forms = "'org/repo:LayerName', ('org/repo:LayerName', {'version': 1}), {device: one of these}, or '' for none"
    raise bad_argument(f"kernel_mapping[{layer!r}]", value, forms)


def _described(layer: str, text: str, metadata: object, *, local: bool) -> LayerSource:
    name = f"kernel_mapping[{layer!r}][1]"
    if not isinstance(metadata, dict) or not set(metadata) <= set(METADATA):
        raise bad_argument(name, metadata, f"a dict with keys among {list(METADATA)}")
    if local:
        raise bad_argument(name, metadata, "no metadata with use_local_kernel=True", "A folder has one version.")
    version, revision, trust = (metadata.get(key) for key in METADATA)
    if (version is None) == (revision is None):
        raise bad_argument(name, metadata, "either 'version' or 'revision'")
    if version is not None and (isinstance(version, bool) or not isinstance(version, int) or version < 0):
        raise bad_argument(f"{name}['version']", version, "a whole number from 0 on, the kernel's major version")
    if revision is not None and not isinstance(revision, str):
        raise bad_argument(f"{name}['revision']", revision, "the name of a branch, tag or commit")
    if trust not in (None, True, False):
        raise bad_argument(f"{name}['trust_remote_code']", trust, "True or False")
    return hub_source(text, version=version, revision=revision, trust=bool(trust))
