"""A talk: its messages, and the commands that the user gives instead of one."""

from dataclasses import dataclass, field

HELP = """\
/help         this
/reset        forget what was said; the system prompt stays
/system TEXT  change the system prompt from here on; without TEXT, show it
/exit         leave, as do /quit and Ctrl-D
Ctrl-C stops an answer; what was said until then stays part of the talk.
A message that begins with / takes a space before it."""

Message = dict[str, str]


class Leave(Exception):
    """The user is done."""


@dataclass
class Conversation:
    """What was said so far."""

    system: str | None = None
    """System prompt; None for none."""
    messages: list[Message] = field(default_factory=list)
    """The user's and the model's, in turn."""

    def say(self, role: str, text: str) -> None:
        """Adds a message."""
        self.messages.append({"role": role, "content": text})

    def whole(self) -> list[Message]:
        """All messages, the system prompt first."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.messages]

    def command(self, line: str) -> str:
        """Carries out a line that begins with "/"; returns what to tell the user.

        Raises:
            Leave: it was /exit or /quit.
            ValueError: there is no such command.
        """
        word, _, rest = line.strip().partition(" ")
        if word in ("/exit", "/quit"):
            raise Leave
        if word == "/help":
            return HELP
        if word == "/reset":
            self.messages.clear()
            return "Forgotten."
        if word != "/system":
            raise ValueError(f"there is no command {word}: /help lists them.")
        if rest.strip():
            self.system = rest.strip()
            return "The system prompt is changed."
        return "There is no system prompt." if self.system is None else self.system
