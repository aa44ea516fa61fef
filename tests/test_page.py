"""The user's page, docs/nvidia-gpu.md, and the programs of Transformers' users: run as written, on the CPU or a GPU.

Hub ids resolve to tiny random checkpoints (hub_cache.py). Without a GPU "cuda" is replaced by "cpu", and what only a
GPU can do must say so.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from cuformers import RequestStatus
from cuformers.cuda.visible import parse
from tests.cuda.machines import gpu
from tests.doc_blocks import Block, blocks
from tests.hub_cache import QWEN3, fill, offline
from tests.hub_layers import calls, install, publish
from tests.paths import ROOT

torch.set_num_threads(1)

PAGE = [b for b in blocks(ROOT / "docs" / "nvidia-gpu.md") if b.language == "python"]
WHERE = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
ON_CPU = {'device_map="cuda"': 'device_map="cpu"', '{"cuda": "kernels-': '{"cpu": "kernels-'}
LIGER = "kernels-community/liger-kernels"

CHECK = """
import torch

print(torch.cuda.is_available(), torch.cuda.device_count())
"""
ATTENTION = """
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-0.6B", dtype="bfloat16", device_map="cuda", attn_implementation="flash_attention_2"
)
"""
GENERATE = """
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype="bfloat16", device_map="cuda")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
text = "The capital of France is"
inputs = tokenizer(text, return_tensors="pt").to(model.device)
output = model.generate(**inputs, max_new_tokens=50, do_sample=False)
print(tokenizer.decode(output[0], skip_special_tokens=True))
"""
IMPORT = "from transformers import AutoModelForCausalLM\n"
KERNELS = """
from transformers import AutoModelForCausalLM, KernelConfig

kernel_mapping = {"RMSNorm": {"cuda": "kernels-community/liger-kernels:LigerRMSNorm"}}
kernel_config = KernelConfig(kernel_mapping)
model = AutoModelForCausalLM.from_pretrained(
    "Qwen/Qwen3-0.6B", use_kernels=True, kernel_config=kernel_config, device_map="cuda"
)
"""
PIPELINE = """
from transformers import pipeline

pipe = pipeline("text-generation", model="Qwen/Qwen3-0.6B", max_new_tokens=20, do_sample=False)
result = pipe("The secret of a good cake is")
"""
BATCH = """
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B", dtype="bfloat16", device_map="cuda")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
texts = ["The capital of France is", "A good cake needs", "Water boils at"]
inputs = [tokenizer.encode(text) for text in texts]
generation_config = GenerationConfig(max_new_tokens=20, do_sample=False, eos_token_id=tokenizer.eos_token_id)
continuous_batching_config = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=512)
outputs = model.generate_batch(inputs, generation_config, continuous_batching_config)
answers = [tokenizer.decode(output.generated_tokens, skip_special_tokens=True) for output in outputs.values()]
"""
TRAINING = """
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

training_args = TrainingArguments(output_dir="./outputs", bf16=True)
print(training_args.device)
model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-0.6B")
tokenizer = AutoTokenizer.from_pretrained("Qwen/Qwen3-0.6B")
ids = tokenizer("The capital of France is Paris")["input_ids"]
train_dataset = [{"input_ids": ids, "labels": ids}] * 16
trainer = Trainer(model=model, args=training_args, train_dataset=train_dataset)
trainer.train()
"""
MANAGER = f"""{BATCH}
manager = model.init_continuous_batching(generation_config, continuous_batching_config)
manager.start()
streamed = manager.add_request(inputs[0], max_new_tokens=8, streaming=True)
lengths = [len(output.generated_tokens) for output in manager.request_id_iter(streamed)]
names = manager.add_requests(inputs)
results = [manager.get_result() for _ in names]
manager.stop()
"""
"""As written for Transformers; only the import changes."""

OURS = {"from transformers import": "from cuformers import"}
DEVICE = """
import torch
from cuformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = (c.from_pretrained("Qwen/Qwen3-0.6B") for c in (AutoModelForCausalLM, AutoTokenizer))
inputs = tokenizer("The capital of France is", return_tensors="pt").to(model.device)
tokens = model.generate(**inputs, max_new_tokens=20, do_sample=False)[0].tolist()
print(torch.cuda.device_count(), model.device, sum(tokens))
"""
ORDER = "import torch; print(*(torch.cuda.get_device_properties(i).uuid for i in range(torch.cuda.device_count())))"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face home whose cache holds the page's checkpoint."""
    path = tmp_path_factory.mktemp("hf")
    fill(path / "hub")
    publish(path / "hub", LIGER, "v1")
    return path


@pytest.fixture(autouse=True)
def hub(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    offline(monkeypatch, home / "hub")


def changes(where: str) -> dict[str, str]:
    return ON_CPU if where == "cpu" else {}


def run(code: str, change: dict[str, str]) -> dict[str, Any]:
    """The names that a program leaves behind."""
    names: dict[str, Any] = {}
    for old, new in change.items():
        assert code.count(old) or old in ON_CPU, f"the program has no {old!r}"
        code = code.replace(old, new)
    exec(code, names)
    return names


def python(home: Path, *words: str, **environment: str) -> list[str]:
    """What a fresh Python prints, offline with the hub's cache."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("CUDA_")}
    fixed = {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, *words], env={**env, **fixed, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def device_of(where: str) -> str:
    return "cuda:0" if where == "cuda" else "cpu"




def test_the_whole_page_is_marked() -> None:
    assert len(PAGE) > 10
    assert [str(b) for b in PAGE if not b.mark] == [], "every program of the user's page is run"
    assert any(b.mark == "runs: gpu" for b in PAGE)


@pytest.mark.parametrize("where", WHERE)
def test_the_page_runs_from_top_to_bottom(
    where: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, "stand-in")
    names: dict[str, Any] = {"__name__": "page"}
    printed: dict[str, str] = {}
    for block in PAGE:
        if block.mark == "runs" or where == "cuda":
            block.run(names, changes(where))
            printed[block.code] = capsys.readouterr().out
    assert str(names["model"].device) == device_of(where) and names["model"].dtype is torch.bfloat16
    assert names["small"].model.layers[0].mlp.up_proj.weight.shape[0] == 256
    result = names["result"]
    assert result.logprobs.shape == (1, len(result.scores)) and result.sequences.shape[0] == 1
    shown = [text for code, text in printed.items() if "TextIteratorStreamer" in code]
    assert shown and shown[0].strip()  # the thread's text came through
    assert names["answer"][0]["generated_text"].startswith("2 times 2 is")
    prompt, outputs = names["inputs"]["input_ids"], names["outputs"].values()
    assert torch.equal(names["guessed"][:, : prompt.shape[1]], prompt) and names["guessed"].shape[1] > prompt.shape[1]
    assert [output.prompt_ids for output in outputs] == names["requests"]
    assert all(len(output.logprobs) == len(output.generated_tokens) > 0 for output in outputs)
    if where == "cuda":
        assert [text for code, text in printed.items() if "deterministic=True" in code] == ["True True\n"]
    chosen = {choice.implementation.name for choice in names["model"].kernels()}
    assert chosen == ({"reference"} if where == "cpu" else {"triton"})


def attention_block() -> Block:
    return next(b for b in PAGE if "flash_attention_2" in b.code)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
@pytest.mark.parametrize("code", [ATTENTION, f"{IMPORT}{attention_block().code}"], ids=["theirs", "ours"])
def test_without_a_gpu_the_page_says_what_is_missing(code: str) -> None:
    with pytest.raises(ValueError, match=r"device_map='cuda' is not possible: .*'cpu'.*cuformers env"):
        run(code, OURS)
    with pytest.raises(ValueError, match=r"flash_attention_2.* needs an NVIDIA GPU.*Possible here: .*sdpa"):
        run(code, {**OURS, **ON_CPU})




def test_torch_is_asked_as_ever(capsys: pytest.CaptureFixture[str]) -> None:
    from cuformers.cuda.device import device_count

    run(CHECK, {})
    assert capsys.readouterr().out.split() == [str(device_count() > 0), str(device_count())]


@pytest.mark.gpu
def test_flash_attention_2() -> None:
    model = run(ATTENTION, OURS)["model"]
    assert model.attn_implementation == "flash_attention_2"
    ids = torch.arange(3, 80, device="cuda")[None]
    with torch.no_grad():
        fast = model(ids).logits
        model.set_attn_implementation("eager")
        torch.testing.assert_close(fast, model(ids).logits, rtol=0.05, atol=0.5)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("device_map", ['device_map="cuda"', 'device_map="auto"'])
def test_generate(where: str, device_map: str, capsys: pytest.CaptureFixture[str]) -> None:
    change = {**OURS, 'device_map="cuda"': device_map, **changes(where)}
    names = run(GENERATE, change)
    assert names["model"].dtype is torch.bfloat16
    ids = names["inputs"]["input_ids"]
    assert torch.equal(names["output"][:, : ids.shape[1]], ids)
    assert capsys.readouterr().out.startswith(names["text"])


@pytest.mark.parametrize("where", WHERE)
def test_generate_gives_the_tokens_of_transformers(where: str, home: Path) -> None:
    """The same program with either import, in float32, where rounding decides nothing."""
    exact = {'"bfloat16"': '"float32"'}
    ours = run(GENERATE, {**OURS, **exact, **changes(where)})
    folder = next((home / "hub").glob("models--*/snapshots/*"))
    theirs = run(GENERATE, {**exact, ', device_map="cuda"': "", QWEN3: str(folder)})
    assert ours["output"].tolist() == theirs["output"].tolist()


@pytest.mark.parametrize("where", WHERE)
def test_pipeline(where: str, home: Path) -> None:
    names = run(PIPELINE, OURS)
    folder = next((home / "hub").glob("models--*/snapshots/*"))
    device = f', model="{folder}", device="cpu"'
    theirs = run(PIPELINE, {f', model="{QWEN3}"': device})
    assert names["result"] == theirs["result"]
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert names["pipe"].device.type == expected and (where == "cpu" or expected == "cuda")


@pytest.mark.parametrize("where", WHERE)
def test_batches(where: str) -> None:
    names = run(MANAGER, {**OURS, **changes(where)})
    assert names["model"].dtype is torch.bfloat16 and str(names["model"].device) == device_of(where)
    assert [output.prompt_ids for output in names["outputs"].values()] == names["inputs"] and all(names["answers"])
    assert sorted(result.request_id for result in names["results"]) == sorted(names["names"])
    for output in (*names["outputs"].values(), *names["results"]):
        assert output.error is None and output.status is RequestStatus.FINISHED
        assert len(output.generated_tokens) == 20 or output.finish_reason == "stop"
    assert names["lengths"] == [*range(1, len(names["lengths"]) + 1)] and len(names["lengths"]) <= 8
    assert not names["manager"].is_running()


@pytest.mark.parametrize("where", WHERE)
def test_batches_give_the_tokens_of_transformers(where: str, home: Path) -> None:
    """Those of its `generate`, in float32: its own batches ask for packages that the tests do without."""
    from transformers import AutoModelForCausalLM

    ours = run(MANAGER, {**OURS, '"bfloat16"': '"float32"', **changes(where)})
    model: Any = AutoModelForCausalLM.from_pretrained(
        next((home / "hub").glob("models--*/snapshots/*")), dtype="float32"
    )
    prompts = [torch.tensor([ids]) for ids in ours["inputs"]]
    theirs = [model.generate(ids, max_new_tokens=20, do_sample=False)[0, ids.shape[1] :].tolist() for ids in prompts]
    results = {result.request_id: result.generated_tokens for result in ours["results"]}
    assert [output.generated_tokens for output in ours["outputs"].values()] == theirs
    assert [results[name] for name in ours["names"]] == theirs



@pytest.mark.parametrize("where", WHERE)
def test_kernels(where: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's layer computes every norm in both modes, and our own kernels come back."""
    install(monkeypatch, "stand-in")
    model = run(KERNELS, {**OURS, **changes(where)})["model"]
    folder = next((home / "hub").glob("kernels--*/snapshots/*"))
    ids = torch.arange(3, 20, device=model.device)[None]
    for mode in (False, True, False):
        model.train(mode)
        calls(folder)
        logits = model(ids, labels=ids, skip_logits=False).logits if mode else _without_gradients(model, ids)
        assert len(calls(folder)) == sum(type(m).__name__ == "RMSNorm" for m in model.modules()) == 9
    (norm,) = (choice for choice in model.kernels() if choice.op == "rms_norm")
    assert norm.implementation.name == f"{LIGER}@v1:LigerRMSNorm" and norm.mode == "infer"
    model.set_use_kernels(False)
    torch.testing.assert_close(_without_gradients(model, ids), logits, rtol=1e-3, atol=1e-3)
    assert calls(folder) == []


@torch.no_grad()
def _without_gradients(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


@pytest.mark.parametrize("where", WHERE)
def test_training(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    change = {"bf16=True": "bf16=True, use_cpu=True"} if where == "cpu" and torch.cuda.is_available() else {}
    names = run(TRAINING, {**OURS, **change})
    assert capsys.readouterr().out.split()[0] == ("cpu" if where == "cpu" else "cuda:0")
    assert names["model"].dtype is torch.bfloat16
    history = names["trainer"].state.log_history
    assert history[-1]["step"] == 6 and 0 < history[-1]["train_loss"] < 20
    assert (tmp_path / "outputs" / "checkpoint-6" / "model.safetensors").is_file()


def test_an_empty_list_means_the_cpu(home: Path) -> None:
    change = {"max_new_tokens=50": "max_new_tokens=20", '"bfloat16"': '"float32"'}
    names = run(GENERATE, {**OURS, **change, **ON_CPU})
    expected = sum(names["output"][0].tolist())
    assert python(home, "-c", DEVICE, CUDA_VISIBLE_DEVICES="") == ["0", "cpu", str(expected)]


def test_torchrun(home: Path, tmp_path: Path) -> None:
    """As the page starts it; every process has the model on its device."""
    count = max(1, min(2, torch.cuda.device_count()))
    program = tmp_path / "program.py"
    program.write_text(DEVICE)
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}")
    listed = ",".join(map(str, range(count))) if torch.cuda.is_available() else ""
    printed = python(home, *launcher, str(program), CUDA_VISIBLE_DEVICES=listed)
    devices = {f"cuda:{i}" for i in range(count)} if torch.cuda.is_available() else {"cpu"}
    assert set(printed[1::3]) == devices


def test_the_pages_table_of_lists() -> None:
    """`0,2` and the others, on a machine of four GPUs."""
    text = (ROOT / "docs" / "nvidia-gpu.md").read_text()
    for row in ("| `0,2` | GPU 0 as `cuda:0`, GPU 2 as `cuda:1` |", "| `2,0` | GPU 2 as `cuda:0`, GPU 0 as `cuda:1` |"):
        assert row in text
    assert "| `0,9,1` on four GPUs | GPU 0 only" in text
    four = [gpu(i) for i in range(4)]
    index = {g.uuid: g.index for g in four}
    selected = {given: [index[uuid] for uuid in parse(given, four).uuids] for given in ("0,2", "2,0", "", "0,9,1")}
    assert selected == {"0,2": [0, 2], "2,0": [2, 0], "": [], "0,9,1": [0]}


def test_env_says_what_the_list_selects(home: Path) -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-m", "cuformers", "env", "--json"]
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, text=True)
    report = json.loads(done.stdout)
    assert report["selection"]["CUDA_VISIBLE_DEVICES"] == "" and report["devices"] == []
    hidden = bool(report["gpus"])
    assert done.returncode == int(hidden)
    assert ("hides every GPU" if hidden else "no NVIDIA GPU found") in report["verdict"]["text"]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="an order takes two GPUs")
def test_the_list_decides_the_order(home: Path) -> None:
    pci = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    plain = python(home, "-c", ORDER, **pci)
    backwards = ",".join(str(i) for i in reversed(range(len(plain))))
    assert python(home, "-c", ORDER, CUDA_VISIBLE_DEVICES=backwards, **pci) == plain[::-1]
    assert python(home, "-c", ORDER, CUDA_VISIBLE_DEVICES="1", **pci) == plain[1:2]
