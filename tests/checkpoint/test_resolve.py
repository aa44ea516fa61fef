"""Finding a checkpoint: local folders, the hub's cache, and each way it can fail. The network is never used."""

import os

import huggingface_hub
import pytest
from huggingface_hub import errors

from cuformers.base.errors import CheckpointError
from cuformers.checkpoint.resolve import (
    FOLDER_PATTERNS,
    folder_patterns,
    http_client,
    looks_like_path,
    require_file,
    resolve_file,
    resolve_folder,
)

COMMIT = "a" * 40


@pytest.fixture
def local(tmp_path):
    folder = tmp_path / "org" / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "sub" / "inner.json").write_text("{}")
    return folder


@pytest.fixture
def cache(tmp_path):
    """A hub cache with one repository, as huggingface_hub lays it out; nothing else can be reached."""
    snapshot = tmp_path / "hub" / "models--org--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (snapshot / "model.safetensors").write_bytes(b"")
    refs = tmp_path / "hub" / "models--org--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text(COMMIT)
    return tmp_path / "hub"


def test_a_local_folder(local, monkeypatch):
    assert resolve_folder(local) == resolve_folder(str(local)) == local
    assert resolve_file(local, "config.json") == require_file(str(local), "config.json") == local / "config.json"
    assert resolve_file(local, "none.json") is None
    assert resolve_file(local, "inner.json", subfolder="sub") == local / "sub" / "inner.json"
    assert resolve_folder(local, subfolder="sub") == local / "sub"
    monkeypatch.chdir(local.parent.parent)
    assert resolve_file("org/model", "config.json").samefile(local / "config.json")  # a folder goes before a hub id
    monkeypatch.setenv("HOME", str(local.parent))
    assert resolve_folder("~/model") == local
    assert resolve_folder(local, revision="main") == local


def test_what_is_wrong_locally(local):
    with pytest.raises(CheckpointError, match=r"no folder 'none': it has config\.json, sub/"):
        resolve_folder(local, subfolder="none")
    with pytest.raises(CheckpointError, match=r"has no x\.json: it has config\.json, sub/"):
        require_file(local, "x.json")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_folder(local / "config.json")
    with pytest.raises(ValueError, match="revision='v1'"):
        resolve_file(local, "config.json", revision="v1")
    for empty in ("", None, 3):
        with pytest.raises(ValueError, match="name_or_path"):
            resolve_file(empty, "config.json")
    with pytest.raises(ValueError, match="patterns"):
        resolve_folder(local, patterns=["*.safetensors", "*.bin"])


@pytest.mark.parametrize("name", ["./x", "../x", "/x/y", "~/x", "a/b/c", "x/", "a//b", "C:\\x", "org/mo del"])
def test_paths_are_not_looked_up_on_the_hub(name, monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: pytest.fail("asked the hub"))
    assert looks_like_path(name)
    monkeypatch.chdir(tmp_path)
    for find in (lambda: resolve_file(name, "config.json"), lambda: resolve_folder(name)):
        with pytest.raises(CheckpointError, match="does not exist"):
            find()


@pytest.mark.parametrize("name", ["gpt2", "Qwen/Qwen3-0.6B", "a_b/c.d-e"])
def test_hub_ids_look_like_none(name):
    assert not looks_like_path(name)


def test_the_cache_answers_offline(cache):
    kwargs = {"cache_dir": cache, "local_files_only": True}
    folder = resolve_folder("org/model", **kwargs)
    assert folder.name == COMMIT and (folder / "config.json").exists()
    assert resolve_file("org/model", "config.json", **kwargs).name == "config.json"
    assert resolve_file("org/model", "chat_template.jinja", **kwargs) is None
    with pytest.raises(CheckpointError, match=r"'x\.json' in the local cache, and fetching is switched off"):
        require_file("org/model", "x.json", **kwargs)
    with pytest.raises(CheckpointError, match=r"no files matching .* in its folder 'none'"):
        resolve_folder("org/model", subfolder="none", **kwargs)
    for find in (
        lambda: resolve_file("org/other", "config.json", **kwargs),
        lambda: resolve_folder("org/other", **kwargs),
        lambda: resolve_folder("org/model", revision="v2", **kwargs),
    ):
        with pytest.raises(CheckpointError, match=r"not \(completely\) in the local cache.*local_files_only=False"):
            find()


httpx = http_client()


def response(status=404):
    return httpx.Response(status, request=httpx.Request("GET", "https://hub.invalid"))


HUB_FAILURES = [
    (errors.GatedRepoError("gated", response=response(403)), "is gated: accept its terms at .*org/model.*HF_TOKEN"),
    (errors.RepositoryNotFoundError("gone", response=response()), "neither a local folder.*spelling.*HF_TOKEN"),
    (errors.RevisionNotFoundError("rev", response=response()), "no revision 'v9'"),
    (errors.LocalEntryNotFoundError("not cached"), "not .completely. in the local cache"),
    (errors.OfflineModeIsEnabled("offline"), "the hub was not reached: offline"),
    (httpx.ConnectError("no route"), "the hub was not reached: no route"),
    (httpx.ReadTimeout("slow"), "the hub was not reached: slow"),
    (errors.HfHubHTTPError("500 server error\nmore", response=response(500)), "can't be fetched: 500 server error$"),
    (errors.HFValidationError("bad id"), "neither a local folder nor a valid hub id: bad id"),
    (PermissionError(13, "Permission denied", "/cache/x"), "/cache/x can't be read: permission denied"),
]


@pytest.mark.parametrize(("failure", "message"), HUB_FAILURES, ids=lambda x: type(x).__name__)
def test_each_failure_of_the_hub_names_its_remedy(failure, message, monkeypatch, tmp_path):
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    for find in (
        lambda: resolve_file("org/model", "config.json", revision="v9", cache_dir=tmp_path),
        lambda: resolve_folder("org/model", revision="v9", cache_dir=tmp_path),
    ):
        with pytest.raises(CheckpointError, match=message) as caught:
            find()
        assert caught.value.__cause__ is failure


def test_arguments_reach_the_hub_and_pickles_do_not_come(monkeypatch, tmp_path):
    seen = {}

    def download(repo, **kwargs):
        seen.update(kwargs, repo=repo)
        (tmp_path / "sub").mkdir(exist_ok=True)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_folder("org/model", revision="v1", token="t", subfolder="sub") == tmp_path / "sub"
    assert (seen["repo"], seen["revision"], seen["token"]) == ("org/model", "v1", "t")
    assert seen["allow_patterns"] == [f"sub/{pattern}" for pattern in FOLDER_PATTERNS]
    files = ["config.json", "pytorch_model.bin", "model.safetensors", "tokenizer.json", "consolidated.00.pth", "x.pkl"]
    files = [f"sub/{file}" for file in files]
    kept = huggingface_hub.utils.filter_repo_objects(
        files, allow_patterns=seen["allow_patterns"], ignore_patterns=seen["ignore_patterns"]
    )
    assert [os.path.basename(file) for file in kept] == ["config.json", "model.safetensors", "tokenizer.json"]


def test_a_missing_file_on_the_hub_is_none(monkeypatch):
    def absent(*args, **kwargs):
        raise errors.RemoteEntryNotFoundError("no such file", response=response())

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", absent)
    assert resolve_file("org/model", "chat_template.jinja") is None
    with pytest.raises(CheckpointError, match=r"no file 'sub/x' in the hub"):
        require_file("org/model", "x", subfolder="sub")


def test_each_variant_has_its_own_files():
    files = ["model.safetensors", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
    fp16 = ["model.fp16.safetensors", "model.fp16-00001-of-00002.safetensors", "model.safetensors.index.fp16.json"]
    for variant, own, other in ((None, files, fp16[:2]), ("fp16", fp16, files[:2])):
        kept = list(huggingface_hub.utils.filter_repo_objects(files + fp16, allow_patterns=folder_patterns(variant)))
        assert set(own) <= set(kept) and not set(other) & set(kept)
