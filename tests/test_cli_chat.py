"""`cuformers chat`: talks, commands and interrupts."""

import builtins
import io
import os
import signal
import subprocess
import sys

import pytest
import torch

import cuformers
from cuformers.cli import chat, main
from cuformers.cli.conversation import HELP, Conversation, Leave
from tests.paths import DATA, ROOT

STORIES = str(DATA / "checkpoints" / "stories260k")
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}One{% endif %}"
)
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
SHORT = ("--max-new-tokens", "12")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def model():
    return cuformers.AutoModelForCausalLM.from_pretrained(STORIES, device_map="cpu")


@pytest.fixture
def tokenizer(monkeypatch, model):
    made = cuformers.AutoTokenizer.from_pretrained(STORIES, chat_template=TEMPLATE)
    monkeypatch.setattr(chat, "load_tokenizer", lambda name, arguments: made)
    monkeypatch.setattr(chat, "load_model", lambda name, arguments: model)
    return made


def talk(monkeypatch, *lines: str, options: tuple[str, ...] = SHORT, code: int = 0) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert main.main(["chat", STORIES, *options]) == code


def answers(model, tokenizer, *messages: str) -> list[str]:
    """What greedy decoding says to each message, by generate alone."""
    history, texts = [], []
    for message in messages:
        history.append({"role": "user", "content": message})
        ids = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        row = model.generate(ids, max_new_tokens=12)[0, ids.shape[1] :]
        texts.append(tokenizer.decode(row, skip_special_tokens=True))
        history.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_each_answer_knows_the_talk_before_it(monkeypatch, capsys, model, tokenizer):
    talk(monkeypatch, "Tim had a ball.", "", "The dog was sad.")
    expected = answers(model, tokenizer, "Tim had a ball.", "The dog was sad.")
    assert capsys.readouterr().out == "".join(text + "\n" for text in expected)
    assert expected[1] != answers(model, tokenizer, "The dog was sad.")[0]


def test_reset_forgets_and_exit_leaves(monkeypatch, capsys, model, tokenizer):
    talk(monkeypatch, "Tim had a ball.", "/reset", "The dog was sad.", "/exit", "Never read.")
    captured = capsys.readouterr()
    expected = answers(model, tokenizer, "Tim had a ball.") + answers(model, tokenizer, "The dog was sad.")
    assert captured.out == "".join(text + "\n" for text in expected)
    assert captured.err == "Forgotten.\n"


def test_the_system_prompt_comes_first_and_can_change(monkeypatch, capsys, model, tokenizer):
    seen = []
    render = tokenizer.apply_chat_template
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda chat, **k: seen.append(list(chat)) or render(chat, **k)
    )
    talk(monkeypatch, "Hi", "/system Be long.", "/system", "Yes", options=(*SHORT, "--system", "Be short."))
    assert [chat[0] for chat in seen] == [{"role": "system", "content": s} for s in ("Be short.", "Be long.")]
    assert [m["role"] for m in seen[1]] == ["system", "user", "assistant", "user"]
    assert capsys.readouterr().err == "The system prompt is changed.\nBe long.\n"


def test_commands():
    talk = Conversation()
    assert talk.command("/help\n") == HELP and talk.command("/system") == "There is no system prompt."
    for line in ("/exit", "/quit\n"):
        with pytest.raises(Leave):
            talk.command(line)
    with pytest.raises(ValueError, match="no command /rest: /help"):
        talk.command("/rest")
    talk.command("/system  Be kind. ")
    talk.say("user", "Hi")
    assert talk.whole() == [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]


def test_a_template_that_refuses_leaves_the_talk_as_it_was(monkeypatch, capsys, model, tokenizer):
    tokenizer.chat_template = REFUSES
    talk(monkeypatch, "Hi", "/nope", options=(*SHORT, "--system", "x"), code=1)
    captured = capsys.readouterr()
    assert captured.out == "" and "no system role" in captured.err and "there is no command /nope" in captured.err
    talk(monkeypatch, "Tim had a ball.")
    assert capsys.readouterr().out == answers(model, tokenizer, "Tim had a ball.")[0] + "\n"


def test_a_tokenizer_without_a_template_is_refused_before_the_model_is_loaded(monkeypatch, capsys, tokenizer):
    tokenizer.chat_template = None
    monkeypatch.setattr(chat, "load_model", None)
    talk(monkeypatch, "Hi", code=2)
    assert "has no chat template" in capsys.readouterr().err


def test_a_talk_that_fills_the_model_says_so(monkeypatch, capsys, tokenizer):
    talk(monkeypatch, "The dog was very, very sad. " * 90, options=(), code=1)
    assert "forget the talk with /reset, or set" in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_what_was_said_stays(monkeypatch, capsys, model, tokenizer):
    whole = answers(model, tokenizer, "Tim had a ball.")[0]
    pieces, seen = [], []
    show, render = chat.stream.__defaults__[0], tokenizer.apply_chat_template  # type: ignore[index]

    def press(text: str) -> None:
        show(text)
        pieces.append(text)
        if len(pieces) == 5:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(chat.stream, "__defaults__", (press,))
    monkeypatch.setattr(
        tokenizer, "apply_chat_template", lambda chat, **k: seen.append(list(chat)) or render(chat, **k)
    )
    talk(monkeypatch, "Tim had a ball.", "And then?", "/reset", "Tim had a ball.")
    first, _, third = capsys.readouterr().out.splitlines()
    said = first.removesuffix(" [stopped]")
    assert said != first and whole.startswith(said) and 0 < len(said) < len(whole)
    assert seen[1][1] == {"role": "assistant", "content": said}
    assert third == whole  # the engine's rows are free and clean again


def test_generation_works_after_an_interrupt_inside_the_engine(model, tokenizer):
    class Breaks(cuformers.TextStreamer):
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            if text:
                raise KeyboardInterrupt

    ids = tokenizer("Once upon a time", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=20)
    with pytest.raises(KeyboardInterrupt):
        model.generate(ids, max_new_tokens=20, streamer=Breaks(tokenizer, skip_prompt=True))
    assert torch.equal(model.generate(ids, max_new_tokens=20), expected)
    both = model.generate(ids.repeat(2, 1), max_new_tokens=20)
    assert torch.equal(both, expected.repeat(2, 1))


def test_in_a_terminal_ctrl_c_drops_the_line_and_ctrl_d_leaves(monkeypatch, capsys, model, tokenizer):
    typed = iter(["Tim had a ball.", KeyboardInterrupt, "/nope", EOFError])

    def read(prompt: str) -> str:
        assert prompt == chat.PROMPT
        line = next(typed)
        if isinstance(line, str):
            return line
        raise line

    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main.main(["chat", STORIES, *SHORT]) == 0
    captured = capsys.readouterr()
    assert captured.out == answers(model, tokenizer, "Tim had a ball.")[0] + "\n\n"
    assert "/help lists the commands" in captured.err and "/exit or Ctrl-D leaves" in captured.err


def test_stats_and_refusals(monkeypatch, capsys, tokenizer):
    talk(monkeypatch, "Hi", options=(*SHORT, "--stats"))
    assert "decode:  12 tokens" in capsys.readouterr().err
    talk(monkeypatch, options=("--num-return-sequences", "2"), code=2)
    assert "one answer at a time" in capsys.readouterr().err


def test_the_process_reads_lines_from_a_pipe(tmp_path, tokenizer, model):
    tokenizer.save_pretrained(tmp_path)
    model.save_pretrained(tmp_path)
    words = [sys.executable, "-m", "cuformers", "chat", str(tmp_path), "--device", "cpu", *SHORT]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, input="Tim had a ball.\n", capture_output=True, text=True, env=environment)
    assert (done.stdout, done.stderr) == (answers(model, tokenizer, "Tim had a ball.")[0] + "\n", "")
