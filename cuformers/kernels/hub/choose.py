"""From a KernelConfig to the table of kernels of one model, device and mode."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import nn

from cuformers.base.errors import bad_argument
from cuformers.base.log import notice
from cuformers.kernels.guard import guarded, where_tensors_are
from cuformers.kernels.hub import gate
from cuformers.kernels.hub.adapters import adapt, contract_problem, plain
from cuformers.kernels.hub.capturing import capture_problem
from cuformers.kernels.hub.compose import Parts, compose
from cuformers.kernels.hub.config import KernelConfig, Rules
from cuformers.kernels.hub.layers import LAYERS, Layer, Uses
from cuformers.kernels.hub.package import SWITCH, switched_on
from cuformers.kernels.hub.rules import ANY_MODE, Rule, find
from cuformers.kernels.hub.source import FAILURES, LayerSource, Source
from cuformers.kernels.hub.taken import Taken, amended
from cuformers.kernels.op import Problem
from cuformers.kernels.table import Kernels, select


def choose(config: KernelConfig, uses: Uses, problem: Problem, device: torch.device, want: str = "auto") -> Kernels:
    """The table `select(problem, want)` with the config's layers in it.

    The same arguments get the same object.

    Raises:
        ImportError: the package `kernels` is needed, and missing.
        ValueError: a layer that the model does not have, or a kernel that can't be loaded or fails the comparison with
            the specification; the message has the numbers.
    """
    if not switched_on():
        notice(f"{SWITCH} is off: kernel_config={config.kernel_mapping} has no effect.", once=True)
        return select(problem, want, deterministic=False)
    return _choose(config.rules, uses, problem, device, want)


@cache
def _choose(rules: Rules, uses: Uses, problem: Problem, device: torch.device, want: str) -> Kernels:
    base = select(problem, want, deterministic=False)
    taken = [_take(name, layer_rules, uses, problem, device) for name, layer_rules in rules]
    _check_once_each([t for t in taken if t.function is not None])
    parts = Parts(
        norm=_function(taken, "norm"),
        gated={t.layer.activation: t.function for t in taken if t.layer.kind in ("activation", "gated") and t.function},
        rotate=_function(taken, "rotary"),
    )
    functions = compose({choice.op: choice.function for choice in base.choices}, parts)
    choices = tuple(amended(choice, functions.get(choice.op, choice.function), taken) for choice in base.choices)
    chosen = {choice.op: choice.function for choice in choices}
    return replace(base, **chosen, choices=choices)  # type: ignore[arg-type]


def _take(name: str, rules: tuple[Rule, ...], uses: Uses, problem: Problem, device: torch.device) -> Taken:
    layer = LAYERS[name]
    reason = uses.why_not(layer)
    if reason is not None:
        raise bad_argument("layer of kernel_config", name, "a layer that the model has", f"Here {reason}.")
    rule = find(rules, problem)
    if isinstance(rule, str):
        return _passed_over(name, layer, _describe(rules[0]), rule)
    if rule.source is None:
        why = f"{name}: switched off in kernel_config"
        return Taken(name=name, layer=layer, kernel="reference", function=plain(layer), why=why)
    return _load(name, layer, rule, uses, problem, device)


def _load(name: str, layer: Layer, rule: Rule, uses: Uses, problem: Problem, device: torch.device) -> Taken:
    assert rule.source is not None, "a rule that switches off loads nothing"
    kernel, training = _describe(rule), problem.mode == "train"
    cls = _class_of(rule.source, kernel)
    reason = contract_problem(cls, layer)
    if reason is None and problem.dtype not in gate.LIMIT:
        reason = f"can't be compared with the specification in {problem.dtype}"
    if reason is not None:
        raise ValueError(f"kernel {kernel} can't serve {name}: it {reason}.")
    function, worst, missing = where_tensors_are(adapt(cls, layer, problem.mode), device.type), 0.0, None
    if training and not getattr(cls, "has_backward", True):
        missing = "has no backward pass"
    else:
        worst, missing = _judge(f"{kernel} for {name}", function, layer, uses, problem, device)
    if missing is not None:
        if rule.mode != ANY_MODE:
            raise ValueError(f"kernel {kernel} is mapped for {rule.mode} of {name}, and {missing}.")
        return _passed_over(name, layer, kernel, missing)
    stops = capture_problem(function, layer, uses, device, problem.dtype)
    why = f"{name}: kernel_config; {uses.count(layer)} modules; error {worst:.0%} of the allowed"
    notice(f"{name} of {uses.count(layer)} modules is computed by {kernel}{f' ({stops})' if stops else ''}.", once=True)
    safe = function if training else guarded(function, plain(layer))
    return Taken(name=name, layer=layer, kernel=kernel, function=safe, why=why, captures=stops is None)


def _class_of(source: LayerSource, kernel: str) -> type[nn.Module]:
    if isinstance(source, Source):
        return source.load()
    try:
        return source.load()
    except FAILURES as failure:
        raise ValueError(f"hub kernel {kernel} can't be loaded: {failure}") from failure


def _judge(
    what: str, function: Callable[..., Any], layer: Layer, uses: Uses, problem: Problem, device: torch.device
) -> tuple[float, str | None]:
    """The greatest error as a fraction of the allowed, and why training can't have the function."""
    where = {"device": device, "dtype": problem.dtype, "mode": problem.mode}
    try:
        return gate.check(function, plain(layer), layer, uses, **where), None
    except gate.BackwardMissing as missing:
        return 0.0, str(missing)
    except ValueError as failure:
        remedy = "It is not used: take it out of kernel_config, or name another version."
        raise ValueError(f"kernel {what} {failure}. {remedy}") from failure


def _passed_over(name: str, layer: Layer, kernel: str, why: str) -> Taken:
    notice(f"{name} keeps our own kernels: {kernel} {why}.", once=True)
    return Taken(name=name, layer=layer, kernel=kernel, function=None, why=why)


def _describe(rule: Rule) -> str:
    source = rule.source
    if source is None or isinstance(source, Source):
        return str(source)
    return f"{type(source).__name__}:{source.layer_name}"  # its own text asks the network


def _function(taken: list[Taken], kind: str) -> Callable[..., Any] | None:
    return next((t.function for t in taken if t.layer.kind == kind), None)


def _check_once_each(taken: list[Taken]) -> None:
    """Two layers of the config must not compute the same thing."""
    seen: dict[str, str] = {}
    for t in taken:
        what = t.layer.activation or t.layer.kind
        if what in seen:
            raise bad_argument("kernel_config", [seen[what], t.name], f"one layer for {what}")
        seen[what] = t.name
