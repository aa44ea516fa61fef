"""Chat templates: text, ids and assistant masks equal to Transformers', and the same conversations refused."""

import copy
import threading
from typing import Any, Literal

import pytest
from paths import SHARED
from tokenizer_folders import write_folder
from tokenizers import Tokenizer
from transformers import AutoTokenizer as Theirs
from transformers.utils import get_json_schema

from cuformers.auto.tokenizers.chat_template import ChatTemplateError
from cuformers.auto.tokenizers.tokenizer import AutoTokenizer
from cuformers.auto.tokenizers.tool_schema import tool_schema

TEMPLATES = SHARED / "data" / "chat_templates"
MINE = """{{ bos_token }}{% for message in messages %}
{%- if message.role == 'wizard' %}{{ raise_exception('no wizards <here>') }}{% endif %}
    {% if message.role == 'system' %}{% continue %}{% endif %}
<|im_start|>{{ message.role }}
{% generation %}{% if message.role == 'assistant' %}{{ message.content | trim }}{% endif %}{% endgeneration %}
{% if message.role != 'assistant' %}{{ message.content }}{% endif %}<|im_end|>
{% endfor %}
{% if tools %}{{ tools | tojson(indent=2) }}{{ tools | tojson }}{% endif %}
{% if add_generation_prompt %}<|im_start|>assistant
{{ strftime_now('%Y') }}{% if mood is defined %}{{ mood }}{% endif %}{% endif %}"""


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def weather(city: str, unit: Literal["C", "F"] = "C", days: int | None = None) -> dict[str, list[float]]:
    """Tells the <b>weather</b> & more.

    It is sunny.

    Args:
        city: Where, for
            example Paris
        unit: The scale (choices: ["C", "F"])
        days: how many: as a number

    Returns:
        The weather.
    """
    return {}


CALL = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": {"city": "Paris é", "days": 3}}}
CALL_TEXT = {"type": "function", "id": "c1", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
TOOL = tool_schema(weather)
TEXT_BLOCKS = [{"type": "text", "text": "part "}, {"type": "image"}, {"type": "text", "text": "two"}]
CHATS: dict[str, tuple[list, dict]] = {
    "one": ([say("user", "Hi there  ")], {}),
    "system": ([say("system", "Be nice. "), say("user", "Hi"), say("assistant", "Hello!\n"), say("user", "<b>&")], {}),
    "long": ([say(role, f" turn {i} ") for i in range(3) for role in ("user", "assistant")], {}),
    "prompt": (
        [say("user", "Hi"), say("assistant", "<think>\nhm\n</think>\n\nok"), say("user", "x")],
        {"add_generation_prompt": True},
    ),
    "tools": ([say("user", "w?")], {"tools": [TOOL], "add_generation_prompt": True}),
    "calls": (
        [
            say("system", "s"),
            say("user", "w?"),
            say("assistant", "", tool_calls=[CALL]),
            say("tool", "sunny", name="weather", tool_call_id="c1"),
            say("assistant", "It is sunny"),
        ],
        {"tools": [TOOL, weather]},
    ),
    "two calls": (
        [
            say("user", "w?"),
            say("assistant", None, tool_calls=[CALL_TEXT, CALL_TEXT]),
            say("tool", "1", name="weather"),
            say("tool", '{"a": 1}', name="weather"),
            say("user", "so?"),
        ],
        {"tools": [TOOL]},
    ),
    "reasons": (
        [
            say("user", "q"),
            say("assistant", "a", reasoning_content="because", thinking="t"),
            say("user", "r"),
            say("assistant", "b", reasoning_content="since"),
        ],
        {},
    ),
    "no thinking": ([say("user", "q")], {"add_generation_prompt": True, "enable_thinking": False}),
    "blocks": ([say("user", TEXT_BLOCKS), say("assistant", [{"type": "text", "text": "ok"}])], {}),
    "wizard": ([say("wizard", "x")], {}),
    "order": ([say("assistant", "x"), say("assistant", "y"), say("user", "z")], {}),
    "late system": ([say("user", "x"), say("system", "y"), say("user", "z")], {}),
    "no content": ([{"role": "user"}], {}),
    "continued": ([say("user", "x"), say("assistant", "the answer is ")], {"continue_final_message": True}),
    "continued block": (
        [say("user", "x"), say("assistant", [{"type": "text", "text": "the answer"}])],
        {"continue_final_message": True},
    ),
    "continued thought": (
        [say("user", "x"), say("assistant", "f", reasoning_content="go on")],
        {"continue_final_message": "reasoning_content"},
    ),
    "documents": ([say("user", "x")], {"documents": [{"title": "T", "text": "D"}]}),
    "variables": (
        [say("user", "x")],
        {"reasoning_effort": "high", "builtin_tools": ["browser", "python"], "mood": "!"},
    ),
}


@pytest.fixture(scope="module")
def pair(folders):
    loaded = Theirs.from_pretrained(str(folders["generic"])), AutoTokenizer.from_pretrained(folders["generic"])
    for tokenizer in loaded:
        tokenizer.add_special_tokens({"bos_token": "<bos>", "pad_token": "<pad>", "sep_token": "<sep>"})
    return loaded


def outcome(tokenizer, chat, **options):
    try:
        made = tokenizer.apply_chat_template(copy.deepcopy(chat), **options)
    except Exception as error:
        return error
    if isinstance(made, (str, list)):
        return made
    return {name: value.tolist() if hasattr(value, "tolist") else value for name, value in made.items()}


def assert_template_equal(pair, source: str, with_masks: bool) -> None:
    for name, (chat, options) in CHATS.items():
        kinds: list[dict] = [{"tokenize": False}]
        if with_masks and "continue_final_message" not in options:
            kinds.append({"return_assistant_tokens_mask": True})
        for kind in kinds:
            expected, got = (outcome(t, chat, chat_template=source, **options, **kind) for t in pair)
            if isinstance(expected, Exception):
                assert isinstance(got, ValueError), (name, kind, expected, got)
                if type(expected).__name__ == "TemplateError":
                    assert str(expected) in str(got)
            else:
                assert got == expected, (name, kind)


@pytest.mark.parametrize("path", sorted(TEMPLATES.glob("*.jinja")) or [None], ids=lambda path: path and path.stem)
def test_published_templates(pair, path):
    if path is None:
        pytest.skip("needs the shared data")
    assert_template_equal(pair, path.read_text(), "training" in path.stem)


def test_own_template(pair):
    assert_template_equal(pair, MINE, with_masks=True)


def test_batches(pair):
    chats = [CHATS["system"][0], CHATS["one"][0], CHATS["long"][0]]
    for options in (
        {"tokenize": False},
        {"padding": True},
        {"return_dict": False},
        {"padding": True, "return_tensors": "pt", "return_assistant_tokens_mask": True},
        {"padding": True, "truncation": True, "max_length": 30, "return_assistant_tokens_mask": True},
        {"return_dict": False, "tokenizer_kwargs": {"padding_side": "left"}, "padding": "max_length", "max_length": 90},
    ):
        expected, got = (outcome(t, chats, chat_template=MINE, **options) for t in pair)
        assert not isinstance(got, Exception), got
        assert got == expected


def test_masks_mark_what_the_assistant_said(pair):
    ours = pair[1]
    chat = [say("user", "a girl"), say("assistant", "a red ball"), say("user", "Lily"), say("assistant", "rain")]
    made = ours.apply_chat_template(chat, chat_template=MINE, return_assistant_tokens_mask=True)
    said = [token for token, own in zip(made.input_ids, made.assistant_masks) if own]
    assert ours.decode(said) == "a red ballrain"


def test_masks_survive_trimmed_offsets(folders, tmp_path):
    # a post-processor that trims offsets leaves a space without a token; Transformers stops marking there
    rust = Tokenizer.from_file(str(folders["generic"] / "tokenizer.json"))
    from tokenizers import processors

    rust.post_processor = processors.ByteLevel(trim_offsets=True)
    ours = AutoTokenizer.from_pretrained(write_folder(tmp_path, rust))
    template = "{% for m in messages %}A:{% generation %} {{ m.content }}{% endgeneration %};{% endfor %}"
    made = ours.apply_chat_template(
        [say("assistant", "red"), say("assistant", "ball")], chat_template=template, return_assistant_tokens_mask=True
    )
    said = [token for token, own in zip(made.input_ids, made.assistant_masks) if own]
    assert ours.decode(said) == " red ball"


def test_named_templates(folders):
    held = {"default": "D{{ messages[0].content }}", "tool_use": "T{{ tools | length }}", "other": "O"}
    theirs, ours = (load(folders["generic"]) for load in (Theirs.from_pretrained, AutoTokenizer.from_pretrained))
    theirs.chat_template = ours.chat_template = held
    for options in ({}, {"tools": [TOOL]}, {"chat_template": "other"}, {"chat_template": "new {{ eos_token }}"}):
        expected, got = (outcome(t, [say("user", "x")], tokenize=False, **options) for t in (theirs, ours))
        assert got == expected
        assert isinstance(got, str)
    ours.chat_template = {"a": "A", "b": "B"}
    with pytest.raises(ValueError, match=r"one of \['a', 'b'\]"):
        ours.apply_chat_template([say("user", "x")])


@pytest.mark.parametrize("places", ["config", "file", "files", "processor"])
def test_where_templates_are_found(folders, tmp_path, places):
    write_folder(
        tmp_path,
        Tokenizer.from_file(str(folders["generic"] / "tokenizer.json")),
        **({"chat_template": [{"name": "default", "template": "C"}]} if places != "processor" else {}),
    )
    (tmp_path / "chat_template.json").write_text('{"chat_template": "P"}')
    if places in ("file", "files"):
        (tmp_path / "chat_template.jinja").write_text("F é", encoding="utf-8")
    if places == "files":
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("R")
    ours = AutoTokenizer.from_pretrained(tmp_path)
    if places == "processor":
        assert ours.chat_template == "P"
    else:
        assert ours.chat_template == Theirs.from_pretrained(str(tmp_path)).chat_template


@pytest.mark.parametrize(
    ("chat", "options", "message"),
    [
        ([], {}, "empty"),
        ("hello", {}, "list of messages"),
        (CHATS["one"][0], {"chat_template": None}, "no chat template"),
        (CHATS["one"][0], {"add_generation_prompt": True, "continue_final_message": True}, "one of them"),
        (CHATS["one"][0], {"return_assistant_tokens_mask": True, "return_dict": False}, "return_dict=True"),
        (CHATS["one"][0], {"return_assistant_tokens_mask": True, "continue_final_message": True}, "exclude"),
        (CHATS["one"][0], {"tools": ["weather"]}, "tools='weather'"),
        (CHATS["one"][0], {"documents": ["text"]}, "documents='text'"),
        (CHATS["wizard"][0], {}, "no wizards <here>"),
        (CHATS["one"][0], {"chat_template": "{% if %}"}, "malformed at line 1"),
        (CHATS["one"][0], {"chat_template": "{{ missing.field }}"}, "'missing' is undefined"),
        (CHATS["one"][0], {"chat_template": "{{ messages.append(1) }}"}, "refuses"),
        (CHATS["one"][0], {"chat_template": "{{ ''.__class__.__mro__ }}"}, "refuses"),
        (CHATS["one"][0], {"chat_template": "x", "continue_final_message": True}, "content"),
        ([say("user", "abc")], {"chat_template": "content", "continue_final_message": True}, "does not print"),
    ],
)
def test_refusals(folders, chat, options, message):
    tokenizer = AutoTokenizer.from_pretrained(folders["generic"])
    options = {"chat_template": MINE, **options}
    with pytest.raises(ValueError, match=message):
        tokenizer.apply_chat_template(chat, **options)


def test_a_template_without_the_variable_says_so(folders, monkeypatch, capsys):
    monkeypatch.delenv("CUFORMERS_QUIET")
    tokenizer = AutoTokenizer.from_pretrained(folders["generic"], chat_template="{{ messages[0].content }}")
    tokenizer.apply_chat_template([say("user", "x")], tools=[TOOL], enable_thinkin=False)
    assert "does not use tools, enable_thinkin; it knows messages" in capsys.readouterr().err


def test_threads_do_not_share_spans(pair):
    ours, failures = pair[1], []
    chat = CHATS["long"][0]
    options = {"chat_template": MINE, "return_assistant_tokens_mask": True}
    expected = ours.apply_chat_template(chat, **options).assistant_masks

    def work() -> None:
        for _ in range(20):
            if ours.apply_chat_template(chat, **options).assistant_masks != expected:
                failures.append("masks")
            if "\ufdd0" in ours.apply_chat_template(chat, chat_template=MINE, tokenize=False):
                failures.append("marks")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def plain(a: int, b: str = "x") -> None:
    """Adds.

    Args:
        a: first
        b: second
    """


def nested(
    a: list[dict[str, int]],
    b: tuple[int, str],
    c: float | None,
    d: int | str | None,
    e: Any,
    f: list[int] | str,
    g: bytes,
) -> int:
    """Does: much

    more than one would think.

    Args:
        a: first
        b: second
           on two lines

        c: third
        d (int): not seen
        d: fourth
        e: fifth
        f: sixth (choices: ["p", "q "])
        g: seventh

    Returns: nothing
    Raises:
        ValueError: never
    """
    return 0


class Holder:
    def method(self, a: bool) -> str:
        """A method.

        Args:
            a: yes or no
        """
        return ""


@pytest.mark.parametrize("function", [plain, nested, weather, Holder().method], ids=lambda f: f.__name__)
def test_functions_become_schemas(function):
    assert tool_schema(function) == get_json_schema(function)


def no_docstring(a: int) -> int:
    return a


def no_hint(a) -> int:
    """D.

    Args:
        a: first
    """
    return a


def no_description(a: int) -> int:
    """D."""
    return a


@pytest.mark.parametrize(
    ("function", "message"),
    [(no_docstring, "no docstring"), (no_hint, "no type hint"), (no_description, "missing from its docstring")],
)
def test_functions_that_say_too_little(function, message):
    with pytest.raises(ValueError, match=message):
        tool_schema(function)


def test_errors_are_value_errors():
    assert issubclass(ChatTemplateError, ValueError)
