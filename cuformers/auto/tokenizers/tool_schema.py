"""A Python function as a tool: its JSON schema, from type hints and a Google-style docstring.

The schema's form is the one chat templates expect ({"type": "function", "function": {...}}), as Transformers makes it.
"""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from cuformers.base.errors import bad_argument

_TYPES: dict[Any, dict[str, Any]] = {
    int: {"type": "integer"},
    float: {"type": "number"},
    str: {"type": "string"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
    Any: {},
}
_SECTION = re.compile(r"^[ \t]*(Args|Returns|Raises):[ \t]*$", re.MULTILINE)
_ARGUMENT = re.compile(r"^\s*(\w+):\s*")
_CHOICES = re.compile(r"\(choices:\s*(.*?)\)\s*$", re.IGNORECASE)


def tool_schema(tool: Mapping[str, Any] | Callable[..., Any]) -> Mapping[str, Any]:
    """The tool's JSON schema: a dict as it is, a function's made from its hints and docstring.

    Raises ValueError, naming what is missing, for a function without docstring, hints or argument descriptions.
    """
    if isinstance(tool, Mapping):
        return tool
    if not (inspect.isfunction(tool) or inspect.ismethod(tool)):
        raise bad_argument("tools", tool, "a list of JSON schemas (dicts) or functions")
    return {"type": "function", "function": _function(tool)}


def _function(function: Callable[..., Any]) -> dict[str, Any]:
    name = getattr(function, "__name__", "function")
    summary, arguments, returned = _docstring(inspect.getdoc(function) or "")
    if not summary and not arguments:
        raise ValueError(f"tools: {name} has no docstring: write one, with an 'Args:' section.")
    hints = get_type_hints(function)
    properties, required = {}, []
    for parameter in _parameters(function):
        if parameter.name not in hints:
            raise ValueError(f"tools: argument {parameter.name!r} of {name} has no type hint.")
        if parameter.name not in arguments:
            raise ValueError(f"tools: argument {parameter.name!r} of {name} is missing from its docstring's 'Args:'.")
        properties[parameter.name] = _described(_schema(hints[parameter.name]), arguments[parameter.name])
        if parameter.default is inspect.Parameter.empty:
            required.append(parameter.name)
    parameters = {"type": "object", "properties": properties} | ({"required": required} if required else {})
    made: dict[str, Any] = {"name": name, "description": summary, "parameters": parameters}
    if "return" in hints:
        made["return"] = _schema(hints["return"]) | ({"description": returned} if returned is not None else {})
    return made


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].name in ("self", "cls") and parameters[0].annotation is inspect.Parameter.empty:
        return parameters[1:]
    return parameters


def _described(schema: dict[str, Any], text: str) -> dict[str, Any]:
    """The schema with its description; a closing "(choices: [...])" becomes an enum."""
    choices = _CHOICES.search(text)
    if choices:
        schema["enum"] = [c.strip() if isinstance(c, str) else c for c in json.loads(choices.group(1))]
        text = text[: choices.start()].strip()
    return {**schema, "description": text}


def _docstring(text: str) -> tuple[str | None, dict[str, str], str | None]:
    """Summary, descriptions by argument, and description of what is returned."""
    marks = list(_SECTION.finditer(text))
    summary = text[: marks[0].start() if marks else len(text)].strip()
    sections: dict[str, str] = {}
    for mark, following in zip(marks, [*marks[1:], None]):
        sections.setdefault(mark.group(1), text[mark.end() : following.start() if following else len(text)])
    returned = sections.get("Returns")
    return summary, _arguments(sections.get("Args", "")), None if returned is None else returned.strip()


def _arguments(section: str) -> dict[str, str]:
    found: dict[str, list[str]] = {}
    name = None
    for line in section.splitlines():
        start = _ARGUMENT.match(line)
        if start:
            name = start.group(1)
            found[name] = [line[start.end() :].strip()]
        elif name is not None and line.strip():
            found[name].append(line.strip())
    return {name: " ".join(lines).strip() for name, lines in found.items()}


def _schema(hint: Any) -> dict[str, Any]:
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is None:
        return dict(_TYPES.get(hint, {"type": "object"}))
    if origin in (Union, types.UnionType):
        return _union(arguments)
    if origin is Literal:
        kinds = list(dict.fromkeys(_TYPES[type(value)]["type"] for value in arguments))
        return {"type": kinds[0] if len(kinds) == 1 else kinds, "enum": list(arguments)}
    if origin is list:
        return {"type": "array", "items": _schema(arguments[0])}
    if origin is tuple:
        if len(arguments) < 2 or ... in arguments:
            raise bad_argument("tools", hint, "list[...] for any number of values, or the single value's own type")
        return {"type": "array", "prefixItems": [_schema(argument) for argument in arguments]}
    if origin is dict:
        return {"type": "object", "additionalProperties": _schema(arguments[1])}
    raise bad_argument(
        "tools", hint, "hints of int, float, str, bool, None, Any, Literal, list, tuple, dict and unions"
    )


def _union(arguments: tuple[Any, ...]) -> dict[str, Any]:
    parts = [_schema(argument) for argument in arguments if argument is not type(None)]
    if len(parts) == 1:
        made = parts[0]
    elif all(isinstance(part.get("type"), str) for part in parts):
        made = {"type": sorted(part["type"] for part in parts)}
    else:
        made = {"anyOf": parts}
    return made | ({"nullable": True} if type(None) in arguments else {})
