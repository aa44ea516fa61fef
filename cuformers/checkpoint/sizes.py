"""Sizes as people write them: "20GiB" is 20 * 2**30 bytes, "20GB" is 20 * 10**9, a plain number is bytes."""

import re

from cuformers.base.errors import bad_argument

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}B": 1000**power for power, letter in enumerate("KMGT", 1)}
_UNITS |= {f"{letter}IB": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(argument: str, value: int | str) -> int:
    """Bytes of a size; `argument` names it in the ValueError that a wrong one raises."""
    allowed = 'a number of bytes, or a text such as "20GiB", "500MB" or "1.5GB"'
    if isinstance(value, int) and not isinstance(value, bool):
        if value < 0:
            raise bad_argument(argument, value, allowed)
        return value
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None:
        raise bad_argument(argument, value, allowed)
    return int(float(found[1]) * unit)
