"""Names go to the module and come back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuformers.checkpoint.weight_map import IDENTITY, Rename, Slice, Split, Stack, WeightMap

PART = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)
REST = st.lists(st.one_of(PART, st.integers(0, 200).map(str)), min_size=1, max_size=5).map(".".join)
LAYERS = WeightMap(
    (
        Split("model.layers.{i}.attn.qkv.{kind}", tuple(f"model.layers.{{i}}.{p}_proj.{{kind}}" for p in "qkv")),
        Stack("model.layers.{i}.experts.{index}.up.weight", "model.layers.{i}.experts.up"),
        Rename("language_model.{*rest}", "model.lm.{*rest}"),
    )
)


@given(REST)
def test_identity(name):
    assert IDENTITY.to_module(name) == IDENTITY.to_file(name) == (name,)


@given(REST)
def test_a_prefix_goes_and_comes_back(rest):
    for rule in (
        Rename("{*r}", "model.{*r}"),
        Rename("language_model.model.{*r}", "model.{*r}"),
        Rename("x{*r}", "{*r}"),
    ):
        table = WeightMap([rule])
        file = rule.file.replace("{*r}", rest)
        assert table.to_module(file) == (rule.module.replace("{*r}", rest),)
        assert table.to_file(*table.to_module(file)) == (file,)


@given(st.integers(0, 99), PART)
def test_a_split_goes_and_comes_back(layer, kind):
    file = f"model.layers.{layer}.attn.qkv.{kind}"
    modules = LAYERS.to_module(file)
    assert modules == tuple(f"model.layers.{layer}.{p}_proj.{kind}" for p in "qkv")
    assert {LAYERS.to_file(module) for module in modules} == {(file,)}


@given(st.integers(0, 99), st.integers(1, 20))
def test_a_stack_goes_and_comes_back(layer, count):
    module = f"model.layers.{layer}.experts.up"
    files = LAYERS.to_file(module, num_stacked=count)
    assert [LAYERS.slice_of(file) for file in files] == [Slice(i, 0, 1) for i in range(count)]
    assert {LAYERS.to_module(file) for file in files} == {(module,)}


@given(st.integers(1, 20))
def test_a_stack_of_pairs_goes_and_comes_back(count):
    table = WeightMap([Stack(("{l}.{index}.gate", "{l}.{index}.up"), "{l}.both")])
    files = table.to_file("3.both", num_stacked=count)
    assert files[:2] == ("3.0.gate", "3.0.up") and len(files) == 2 * count
    assert [table.slice_of(file) for file in files] == [Slice(i, p, 2) for i in range(count) for p in range(2)]
    assert {table.to_module(file) for file in files} == {("3.both",)}


@given(REST)
def test_every_table_comes_back_from_the_module(rest):
    for file in (rest, "language_model." + rest, "model.layers.3.attn.qkv." + rest):
        for module in LAYERS.to_module(file):
            for back in LAYERS.to_file(module, num_stacked=1):
                assert module in LAYERS.to_module(back)


def test_first_rule_wins_and_parts_do_not_cross_dots():
    table = WeightMap([Rename("a.{x}.w", "one.{x}.w"), Rename("a.{*x}", "two.{*x}")])
    assert table.to_module("a.b.w") == ("one.b.w",)
    assert table.to_module("a.b.c.w") == ("two.b.c.w",)
    assert table.to_module("aXb.w") == ("aXb.w",)  # the dot of a template is a dot
    assert LAYERS.slice_of("model.layers.0.experts.01.up.weight") is None  # one slice has one name


@pytest.mark.parametrize(
    "make",
    [
        lambda: Rename("a.{x}", "b"),
        lambda: Rename("a", "b.{x}"),
        lambda: Rename("a.{x}.{x}", "b.{x}"),
        lambda: Split("a.{x}", ("b.{x}",)),
        lambda: Split("a.{x}", ("b.{x}", "c")),
        lambda: Stack("a.{x}", "b.{x}"),
        lambda: Stack("a.{index}", "b.{index}"),
        lambda: Stack(("a.{index}", "b"), "c"),
    ],
)
def test_a_rule_without_a_way_back_is_refused(make):
    with pytest.raises(ValueError, match=r"placeholder|at least two"):
        make()


def test_rules_without_placeholders():
    table = WeightMap([Rename("old", "new"), Stack("e.{index}", "e"), Split("qk", ("q", "k"))])
    assert (table.to_module("old"), table.to_file("new")) == (("new",), ("old",))
    assert (table.to_module("e.1"), table.to_file("e", num_stacked=2)) == (("e",), ("e.0", "e.1"))
    assert (table.to_module("qk"), table.to_file("q"), table.to_file("k")) == (("q", "k"), ("qk",), ("qk",))
