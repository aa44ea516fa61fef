"""The text-generation pipeline against Transformers', on a real checkpoint."""

import pytest
import torch

import cuformers
from cuformers.auto.builtin import builtin_folder
from cuformers.auto.pipelines import pipeline as factory
from cuformers.auto.pipelines.text_generation import TextGenerationPipeline
from cuformers.base.errors import CheckpointError
from tests.paths import DATA

STORIES = DATA / "checkpoints" / "stories260k"
TEMPLATE = (
    "{{ bos_token }}{% if tools %}Tools: {% for t in tools %}{{ t.function.name }} {% endfor %}{% endif %}"
    "{% for m in messages %}{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}One day{% endif %}"
)
TEXTS = ["Once upon a time", "Lily and Tom went to the park. They", "The dog"]
CHATS = [
    [{"role": "user", "content": "Tim had a ball."}],
    [{"role": "system", "content": "A story."}, {"role": "user", "content": "The cat was big and very happy."}],
    [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A girl named"}],
]
TOOL = {"type": "function", "function": {"name": "dig", "description": "d", "parameters": {"type": "object"}}}
GREEDY = {"do_sample": False, "max_new_tokens": 12}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def prepared(library):
    tokenizer = library.AutoTokenizer.from_pretrained(STORIES)
    tokenizer.pad_token = "<unk>"
    tokenizer.chat_template = TEMPLATE
    model = library.AutoModelForCausalLM.from_pretrained(STORIES, device_map="cpu" if library is cuformers else None)
    return library.pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")


@pytest.fixture(scope="module")
def ours():
    return prepared(cuformers)


@pytest.fixture(scope="module")
def theirs():
    return prepared(pytest.importorskip("transformers"))


@pytest.mark.parametrize(
    ("given", "options"),
    [
        (TEXTS[0], {}),
        (TEXTS[0], {"return_full_text": False}),
        (TEXTS[0], {"return_tensors": True}),
        (TEXTS, {}),
        (TEXTS, {"batch_size": 3}),
        (TEXTS, {"batch_size": 2, "return_tensors": True}),
        (TEXTS[:1], {}),
        ("", {}),
        (TEXTS[0], {"skip_special_tokens": False, "add_special_tokens": False}),
        (TEXTS[1], {"truncation": True, "tokenizer_encode_kwargs": {"max_length": 6}}),
        (TEXTS[1], {"padding": "max_length", "tokenizer_encode_kwargs": {"max_length": 30}, "return_tensors": True}),
        (TEXTS[0], {"stop_sequence": ".", "max_new_tokens": 60}),
        (TEXTS[0], {"prefix": "Lily was sad. "}),
        (TEXTS, {"batch_size": 3, "repetition_penalty": 1.3, "max_new_tokens": 20}),
        (CHATS[0], {}),
        (CHATS[0], {"return_full_text": False, "tools": [TOOL]}),
        (CHATS[2], {}),
        (CHATS[2], {"continue_final_message": False}),
        (CHATS, {"batch_size": 3}),
        (CHATS, {"batch_size": 3, "return_tensors": True}),
    ],
)
def test_answers_are_transformers(ours, theirs, given, options):
    options = {**GREEDY, **options}
    assert ours(given, **options) == theirs(given, **options)


def test_a_hole_is_cut_where_the_answer_needs_room(ours, theirs, monkeypatch):
    for pipe in (ours, theirs):
        monkeypatch.setattr(pipe.tokenizer, "model_max_length", 20)
    options = {**GREEDY, "handle_long_generation": "hole", "return_tensors": True}
    (answer,) = ours(TEXTS[1], **options)
    assert [answer] == theirs(TEXTS[1], **options) and len(answer["generated_token_ids"]) == 20
    with pytest.raises(ValueError, match="model_max_length=20"):
        ours(TEXTS[1], **{**options, "max_new_tokens": 20})


def test_streams_answer_one_by_one_as_they_are_asked_for(ours, theirs):
    read = []

    def texts():
        for text in TEXTS * 2:
            read.append(text)
            yield text

    answers = ours(texts(), batch_size=2, **GREEDY)
    first = next(answers)
    assert len(read) == 2
    expected = theirs(TEXTS * 2, **GREEDY)
    assert [first, *answers] == expected
    assert list(ours((chat for chat in CHATS), **GREEDY)) == theirs(CHATS, **GREEDY)
    assert ours((message for message in CHATS[1]), **GREEDY) == theirs(CHATS[1], **GREEDY)
    assert ours([], **GREEDY) == [] and list(ours(iter([]), **GREEDY)) == []


def test_datasets_stream(ours, theirs):
    class Texts(torch.utils.data.Dataset):
        def __len__(self):
            return len(TEXTS)

        def __getitem__(self, index):
            return TEXTS[index]

    assert list(ours(Texts(), batch_size=2, **GREEDY)) == theirs(TEXTS, **GREEDY)


def test_what_generate_returns_beside_the_tokens(ours, theirs):
    options = {**GREEDY, "max_new_tokens": 3, "return_dict_in_generate": True, "output_scores": True}
    (mine,), (reference,) = ours(TEXTS[0], **options), theirs(TEXTS[0], **options)
    assert mine["generated_text"] == reference["generated_text"]
    torch.testing.assert_close(torch.tensor(mine["scores"]), torch.tensor(reference["scores"]), atol=1e-4, rtol=1e-4)
    batch = ours(TEXTS, batch_size=3, **options)
    torch.testing.assert_close(torch.tensor(batch[0][0]["scores"]), torch.tensor(mine["scores"]), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("answers", "size"), [(2, 1), (3, 1), (2, 3)])
def test_answers_of_beam_search_come_with_their_own_scores(ours, answers, size):
    options = {**GREEDY, "num_beams": 3, "num_return_sequences": answers, "return_tensors": True}
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    for records in ours(TEXTS, batch_size=size, **options, **wanted):
        assert len(records) == answers
        for record in records:
            assert set(record) == {"generated_token_ids", "sequences_scores", "scores", "logits"}
            answer = torch.tensor(record["generated_token_ids"][-12:])
            scores, logits = torch.tensor(record["scores"]), torch.tensor(record["logits"])
            assert len(scores) == len(logits) == len(answer) == 12
            total = scores.gather(1, answer[:, None]).sum() / len(answer)
            torch.testing.assert_close(total, torch.tensor(record["sequences_scores"]), atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(logits.log_softmax(-1), scores, atol=1e-5, rtol=1e-5)


def test_defaults_are_transformers(ours, theirs):
    for name in ("max_new_tokens", "do_sample", "temperature", "eos_token_id", "bos_token_id", "pad_token_id"):
        assert ours.generation_config.get(name) == getattr(theirs.generation_config, name), name


def test_the_checkpoint_and_the_caller_count_more_than_the_defaults(ours):
    config = cuformers.GenerationConfig(do_sample=False, max_length=30, repetition_penalty=1.5)
    model, tokenizer = ours.model, ours.tokenizer
    pipe = TextGenerationPipeline(model, tokenizer, generation_config=config, repetition_penalty=1.0)
    assert pipe.generation_config.max_new_tokens is None and pipe.generation_config.repetition_penalty == 1.0
    assert config == cuformers.GenerationConfig(do_sample=False, max_length=30, repetition_penalty=1.5)
    ids = model.generate(tokenizer(TEXTS[0], return_tensors="pt")["input_ids"], max_length=30)[0].tolist()
    assert pipe(TEXTS[0], return_tensors=True)[0]["generated_token_ids"] == ids and len(ids) == 30
    # A length for the whole wins over the default number of new tokens; Transformers lets its default win.
    assert ours(TEXTS[0], max_length=30, do_sample=False, return_tensors=True)[0]["generated_token_ids"] == ids
    config = cuformers.GenerationConfig(max_new_tokens=7)  # replaces the pipeline's, so it is greedy
    assert ours(TEXTS[0], generation_config=config, return_tensors=True)[0]["generated_token_ids"] == ids[:12]


def test_a_default_that_rests_is_not_the_users_fault(ours, capfd):
    ours(TEXTS[0], **GREEDY)
    assert capfd.readouterr().err == ""


def test_sampling_repeats_with_a_seed_and_gives_several_answers(ours):
    first = ours(TEXTS[:2], num_return_sequences=3, max_new_tokens=15, seed=5, batch_size=2)
    assert first == ours(TEXTS[:2], num_return_sequences=3, max_new_tokens=15, seed=5, batch_size=2)
    assert [len(answers) for answers in first] == [3, 3]
    assert len({a["generated_text"] for a in first[0]}) > 1
    assert all(a["generated_text"].startswith(TEXTS[1]) for a in first[1])


def test_batches_need_no_pad_token(ours):
    pipe = factory.pipeline(model=STORIES, device=-1)
    assert pipe.tokenizer.pad_token_id is None
    assert pipe(TEXTS, batch_size=3, **GREEDY) == ours(TEXTS, batch_size=3, **GREEDY)


def test_stop_strings_find_their_tokenizer(ours):
    (answer,) = ours(TEXTS[0], do_sample=False, stop_strings=["girl"])
    assert answer["generated_text"].endswith("little girl")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"task": "fill-mask"}, "task='fill-mask' is not possible: allowed is 'text-generation'"),
        ({"device": "cpu", "device_map": "cpu"}, "device and device_map both"),
        ({"device": "cpu", "model_kwargs": {"device_map": "cpu"}}, "device and device_map both"),
        ({"device_map": "cpu", "model_kwargs": {"device_map": "cpu"}}, "device_map is given to pipeline and in"),
        ({"dtype": "float32", "model_kwargs": {"dtype": "float32"}}, "dtype is given to pipeline and in model_kwargs"),
        ({"dtype": "float32", "torch_dtype": "float32"}, "name the same thing"),
        ({"device": "cpu", "max_new_token": 5}, "Did you mean max_new_tokens"),
        ({"device": "cpu", "batch_size": 0}, "batch_size=0"),
        ({"device": "cpu", "num_beam_groups": 4}, "num_beam_groups=4 is not supported"),
        ({"device": "cpu", "image_processor": "x"}, "image_processor"),
        ({"device": "cpu", "trust_remote_code": True}, "trust_remote_code"),
        ({"device": "cpu", "use_fast": False}, "use_fast=False"),
        ({"model": 5}, "model='int'"),
        ({"model": None, "tokenizer": "x"}, "tokenizer is given without a model"),
    ],
)
def test_mistakes_in_making_one(arguments, text):
    with pytest.raises(ValueError, match=text.replace("(", r"\(")):
        factory.pipeline(**{"model": STORIES, **arguments})


@pytest.mark.parametrize(
    ("given", "options", "text"),
    [
        (TEXTS[0], {"temprature": 1.0}, "temprature"),
        (TEXTS[0], {"return_full_text": True, "return_tensors": True}, "exclude each other"),
        (TEXTS[0], {"return_full_text": True, "return_text": True}, "exclude each other"),
        (TEXTS[0], {"return_text": False}, "return_text=False"),
        (TEXTS[0], {"handle_long_generation": "pit"}, "None or 'hole'"),
        (5, {}, "text_inputs=5"),
        ({"role": "user", "content": "Hi"}, {}, "put the message into a list"),
        ([TEXTS[0], 5], {}, "an element of text_inputs=5"),
        ([CHATS[0][0], {"role": "user"}], {}, "a dict with 'role' and 'content'"),
        (TEXTS, {"batch_size": 3, "streamer": cuformers.TextStreamer}, "streamer takes one row"),
    ],
)
def test_mistakes_in_calling_one(ours, given, options, text):
    with pytest.raises(ValueError, match=text):
        ours(given, **options)


def test_a_streams_options_are_checked_before_it_is_read(ours):
    with pytest.raises(ValueError, match="temprature"):
        ours((text for text in TEXTS), temprature=1.0)


def test_a_loaded_model_keeps_its_place_and_refuses_what_only_loading_can_do(ours):
    pipe = factory.pipeline(model=ours.model)
    assert pipe.model is ours.model and pipe.tokenizer.name_or_path == str(STORIES)
    with pytest.raises(ValueError, match="dtype can't be changed on a loaded model"):
        factory.pipeline(model=ours.model, dtype="bfloat16")
    nameless = cuformers.AutoModelForCausalLM.from_config(ours.model.config, device_map="cpu")
    with pytest.raises(ValueError, match="pass tokenizer="):
        factory.pipeline(model=nameless)


def test_saved_pipelines_are_read_back(ours, tmp_path):
    ours.save_pretrained(tmp_path)
    pipe = factory.pipeline(model=tmp_path, device="cpu")
    assert pipe(CHATS[0], **GREEDY) == ours(CHATS[0], **GREEDY)


def test_without_a_model_the_built_in_one_is_taken(monkeypatch, tmp_path):
    monkeypatch.setattr(factory, "builtin_folder", lambda: STORIES)
    pipe = factory.pipeline("text-generation", device="cpu", dtype="float32")
    assert pipe.model.name_or_path == str(STORIES)
    monkeypatch.setattr("cuformers.auto.builtin._FOLDER", tmp_path)
    with pytest.raises(CheckpointError, match="name a model"):
        builtin_folder()
