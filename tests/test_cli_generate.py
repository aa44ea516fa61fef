"""`cuformers generate`: what it prints, and which flags it has."""

import io
import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import fields

import pytest
import torch

import cuformers
from cuformers.cli import answer, generate, main, sampling_flags, stats
from cuformers.cuda import bandwidth
from cuformers.generation.config import FIELDS, GenerationConfig
from cuformers.generation.resolving import resolve
from tests.paths import DATA, ROOT

STORIES = str(DATA / "checkpoints" / "stories260k")
PROMPT = "Once upon a time"
GREEDY = PROMPT + ", there was a little girl named Lily. She loved to play outside in the park."
CPU = ("--device", "cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def loaded_once(monkeypatch, model):
    monkeypatch.setattr(generate, "load_model", lambda name, arguments: model)


@pytest.fixture(scope="module")
def model():
    return cuformers.AutoModelForCausalLM.from_pretrained(STORIES, device_map="cpu")


def said(capsys, *words: str, code: int = 0) -> str:
    assert main.main(["generate", *words]) == code
    return capsys.readouterr().out


def test_a_prompt_is_continued_as_it_comes(capsys, monkeypatch):
    pieces = []
    monkeypatch.setattr(generate, "show", pieces.append)
    said(capsys, STORIES, PROMPT, "--max-new-tokens", "27")
    assert "".join(pieces) == GREEDY and pieces[0] == PROMPT and len(pieces) == 1 + 27 + 1


def test_the_process_prints_the_text_and_nothing_else():
    words = [sys.executable, "-m", "cuformers", "generate", *CPU, STORIES, PROMPT, "--max-new-tokens", "27"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True, env=environment)
    assert (done.stdout, done.stderr) == (GREEDY + "\n", "")


def test_one_word_is_a_prompt_for_the_built_in_model(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr("cuformers.auto.builtin._FOLDER", DATA / "checkpoints" / "stories260k")
    assert said(capsys, PROMPT, "--max-new-tokens=27") == GREEDY + "\n"
    assert said(capsys, "Lily " * 90, "--max-new-tokens=3").startswith("Lily " * 90)  # longer than a file's name may be
    monkeypatch.setattr("cuformers.auto.builtin._FOLDER", tmp_path)
    assert main.main(["generate", PROMPT]) == 2
    assert "name a model" in capsys.readouterr().err


def test_a_dash_reads_the_prompt_from_stdin(capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO(PROMPT + "\n"))
    assert said(capsys, STORIES, "-", "--max-new-tokens", "27") == GREEDY + "\n"


def test_a_prompt_that_looks_like_a_flag_follows_two_dashes(capsys):
    out = said(capsys, "--max-new-tokens", "3", STORIES, "--", "--seed")
    assert out.startswith("--seed")


def test_json_is_one_object_with_everything(capsys):
    found = json.loads(said(capsys, STORIES, PROMPT, "--json", "--max-new-tokens", "27"))
    assert (found["prompt"], found["text"]) == (PROMPT, GREEDY.removeprefix(PROMPT))
    assert len(found["tokens"]) == 27 and found["finish_reason"] == "length"
    assert found["stats"]["prompt_tokens"] == 5 and found["stats"]["decode_tokens_per_second"] > 0
    assert found["options"] == {"max_new_tokens": 27}


def test_text_that_ends_early_says_why(capsys):
    words = (STORIES, PROMPT, "--json", "--max-new-tokens", "60")
    found = json.loads(said(capsys, *words, "--stop-strings", "girl", "--stop-strings", "boy"))
    assert found["text"].endswith("little girl") and found["finish_reason"] == "stop"
    end = found["tokens"][-1]
    found = json.loads(said(capsys, *words, "--eos-token-id", str(end)))
    assert found["tokens"][-1] == end and found["finish_reason"] == "eos"


def test_a_seed_repeats_the_draw_and_without_one_each_run_differs(capsys):
    words = (STORIES, PROMPT, "--json", "--max-new-tokens", "30", "--temperature", "1.2")
    one, same, other, another = (
        json.loads(said(capsys, *words, *more)) for more in (["--seed", "7"], ["--seed", "7"], [], [])
    )
    assert one["tokens"] == same["tokens"] and one["options"]["do_sample"] is True
    assert other["options"]["seed"] != another["options"]["seed"] and other["tokens"] != another["tokens"]
    again = json.loads(said(capsys, *words, "--seed", str(other["options"]["seed"])))
    assert again["tokens"] == other["tokens"]


def test_several_answers_come_in_turn(capsys, model):
    words = (STORIES, PROMPT, "--num-return-sequences", "3", "--seed", "1", "--max-new-tokens", "12")
    ids = torch.tensor([cuformers.AutoTokenizer.from_pretrained(STORIES)(PROMPT)["input_ids"]])
    rows = model.generate(ids, do_sample=True, num_return_sequences=3, seed=1, max_new_tokens=12)
    found = [json.loads(line) for line in said(capsys, *words, "--json").splitlines()]
    assert [f["tokens"] for f in found] == rows[:, 5:].tolist()
    assert said(capsys, *words) == "\n\n".join(PROMPT + f["text"] for f in found) + "\n"


def test_a_chat_shows_the_answer_only(capsys, monkeypatch):
    tokenizer = cuformers.AutoTokenizer.from_pretrained(
        STORIES, chat_template="{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    )
    monkeypatch.setattr(generate, "load_tokenizer", lambda name, arguments: tokenizer)
    seen = []
    monkeypatch.setattr(generate, "stream", lambda m, t, asked, *a, **k: seen.append((asked.ids, k)) or STREAMED)
    said(capsys, STORIES, "Hi", "--chat", "--system", "Short.")
    ((ids, options),) = seen
    assert tokenizer.decode(ids[0]) == "system: Short.\nuser: Hi\n" and options == {"with_prompt": False}


STREAMED = (answer.Answer("x", [1], "eos"), [0.0, 1.0])


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([STORIES], "is a model's folder, and there is no prompt"),
        ([STORIES, "Once", "upon"], "put the prompt in quotes"),
        ([STORIES, PROMPT, "--temperature", "-1"], "temperature=-1.0 is not possible"),
        ([STORIES, PROMPT, "--num-return-sequences", "2", "--stats"], "--stats measures one answer"),
        ([STORIES, PROMPT, "--chat"], "no chat template"),
        ([STORIES, PROMPT, "--system", "x"], "give --chat too"),
        ([STORIES, "Lily " * 600], "shorten it, or set --max-new-tokens"),
        ([STORIES + "/nowhere", PROMPT], "nowhere"),
    ],
)
def test_mistakes_are_said_in_one_line(capsys, words, text):
    assert main.main(["generate", *words]) == 2
    err = capsys.readouterr().err
    assert text in err and err.startswith("cuformers: ")


@pytest.mark.parametrize(
    "words", [["--top-k", "x", "a", "b"], ["--no-such-flag", "a"], ["--bad-words-ids", "5,", "a"], []]
)
def test_mistakes_that_argparse_finds(capsys, words):
    with pytest.raises(SystemExit) as stop:
        main.main(["generate", *words])
    assert stop.value.code == 2 and capsys.readouterr().err


def test_the_flags_are_the_options_of_generate():
    parser = generate._parser()
    flags = {a.dest: a for a in parser._actions if a.dest in FIELDS}
    assert set(flags) == set(FIELDS) - set(sampling_flags.OF_THE_API)
    about = sampling_flags.field_docstrings(GenerationConfig)
    assert set(about) == {f.name for f in fields(GenerationConfig)}
    assert all((flags[name].help or "").startswith(about[name].replace("%", "%%")) for name in flags)
    parser.format_help()


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["--top-k", "5"], {"top_k": 5, "do_sample": True}),
        (["--top-p", "0.5", "--no-do-sample"], {"top_p": 0.5, "do_sample": False}),
        (["--temperature", "0"], {"temperature": 0.0, "do_sample": False}),
        (["--temperature", "0", "--top-k", "5"], {"temperature": 0.0, "top_k": 5, "do_sample": False}),
        (["--seed", "4"], {"seed": 4, "do_sample": True}),
        (["--seed", "[4, 5]"], {"seed": [4, 5], "do_sample": True}),
        (["--repetition-penalty", "1.1"], {"repetition_penalty": 1.1}),
        (["--bad-words-ids", "[[5, 6]]"], {"bad_words_ids": [[5, 6]]}),
        (["--sequence-bias", "[[[5], -1.0]]"], {"sequence_bias": [[[5], -1.0]]}),
        (["--exponential-decay-length-penalty", "[5, 1.5]"], {"exponential_decay_length_penalty": [5, 1.5]}),
        (["--stop-strings", "a", "--stop-strings", "b"], {"stop_strings": ["a", "b"]}),
    ],
)
def test_flags_are_read_as_options(words, options):
    assert sampling_flags.given_options(generate._parser().parse_args([*words, "x"])) == options
    resolve(None, None, {**options, "eos_token_id": 2}, 5)  # generate takes them all


def test_the_options_of_drawing_are_those_that_greedy_decoding_ignores():
    from cuformers.generation import resolving

    assert set(resolving._SAMPLING) | {"seed", "num_return_sequences"} == set(sampling_flags.NEED_SAMPLING)


def test_help_loads_no_torch():
    program = (
        "import sys; from cuformers.cli import generate, chat\n"
        "for verb in (generate, chat):\n"
        "    try: verb.main(['--help'])\n"
        "    except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'huggingface_hub' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--max-new-tokens" in done.stdout and "Default here: 200" in done.stdout


def test_stats_count_what_decoding_reads(model, monkeypatch):
    # 5 layers of 4 key-value heads of 8 elements, float32, keys and values; the embedding is the head.
    weights, row = 4 * 260_032, 5 * 2 * 4 * 8 * 4
    assert stats.decode_bytes(model, 7, 3) == 3 * weights + row * (8 + 9 + 10)
    monkeypatch.setitem(bandwidth.TERABYTES_PER_SECOND, "CPU", 0.001)  # type: ignore[index]
    found = stats.measure(model, 7, [1.0, 1.5, 2.0, 2.5, 3.0])
    assert (found.new_tokens, found.prompt_tokens_per_second, found.decode_tokens_per_second) == (4, 14.0, 2.0)
    speed = stats.decode_bytes(model, 7, 3) / 1.5
    assert math.isclose(found.gigabytes_per_second or 0, speed / 1e9)
    assert math.isclose(found.fraction_of_card or 0, speed / 1e9)
    assert f"{speed / 1e9:.1%} of the card's 1" in "\n".join(found.lines())
    assert stats.measure(model, 7, [1.0, 1.5]).decode_tokens_per_second is None


def test_stats_leave_a_windows_rest_and_an_idle_embedding_out():
    config = cuformers.AutoConfig.for_model(
        "mistral", vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, sliding_window=4, tie_word_embeddings=False,
    )  # fmt: skip
    small = cuformers.AutoModelForCausalLM.from_config(config, device_map="cpu", dtype="float32")
    weights = small.get_memory_footprint() - 64 * 32 * 4
    assert stats.decode_bytes(small, 2, 3) == 3 * weights + 2 * (2 * 2 * 8 * 4) * (3 + 4 + 4)


def test_stats_are_shown_after_a_warm_up(capsys):
    assert main.main(["generate", STORIES, PROMPT, "--stats", "--max-new-tokens", "27"]) == 0
    captured = capsys.readouterr()
    assert captured.out == GREEDY + "\n"
    rows = captured.err.splitlines()
    assert [row.split(":")[0] for row in rows] == ["prompt", "decode", "reads", "peak", "warm-up"]
    assert "5 tokens" in rows[0] and "27 tokens" in rows[1] and "no figure is known for the memory of CPU" in rows[2]


def test_ctrl_c_keeps_what_was_said(capsys, monkeypatch):
    pieces, before = [], signal.getsignal(signal.SIGINT)

    def press(text: str) -> None:
        pieces.append(text)
        if text and "".join(pieces).endswith("little girl"):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(generate, "show", press)
    assert said(capsys, STORIES, PROMPT, code=130) == "\n"
    assert "".join(pieces) == PROMPT + ", there was a little girl"
    monkeypatch.setattr(generate, "show", answer.show)
    assert said(capsys, STORIES, PROMPT, "--max-new-tokens", "27") == GREEDY + "\n"
    assert signal.getsignal(signal.SIGINT) is before


def test_the_second_ctrl_c_interrupts_at_once():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), answer.interruptible() as interrupt:
        signal.raise_signal(signal.SIGINT)
        assert interrupt.pressed
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
