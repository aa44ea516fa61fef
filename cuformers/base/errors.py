"""How cuformers says no: every message names the argument, the value, what is allowed and the remedy."""


def bad_argument(argument: str, value: object, allowed: str, remedy: str = "") -> ValueError:
    """A ValueError to raise for an argument the user gave."""
    text = f"{argument}={value!r} is not possible: allowed is {allowed}."
    return ValueError(f"{text} {remedy}".rstrip())


class CheckpointError(ValueError):
    """A checkpoint that can't be read or written as asked: corrupt, incomplete, or not fitting the model."""


class OutOfDeviceMemory(ValueError):
    """A placement that can't fit: the message gives needed and available bytes for each device."""
