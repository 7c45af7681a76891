"""Serving recipes: strict, with sources, and overridable by key."""

import re
from pathlib import Path

import pytest

from spec.recipes.load import find_recipe
from spec.serve.recipe import SHIPPED_SERVE, load_serve_recipe
from spec.serve.rules import LONGER

SHIPPED = sorted(path.name.removesuffix(".yaml") for path in SHIPPED_SERVE.glob("*.yaml"))
NEEDED = ["glm-5.2", "kimi-k2.6-b200-tp4", "kimi-k2.6-b200-tp8", "local-cpu", "qwen3-8b"]


def test_the_shipped_ones() -> None:
    assert SHIPPED == NEEDED
    tp4, tp8 = (load_serve_recipe(f"kimi-k2.6-b200-tp{n}") for n in (4, 8))
    assert (tp4.engine.tensor_parallel, tp8.engine.tensor_parallel) == (4, 8)
    assert (tp4.draft.quantization, tp8.draft.quantization) == ("compressed-tensors", "none")
    assert tp4.engine.hicache is not None
    assert tp4.engine.metrics and tp4.engine.return_token_ids
    assert load_serve_recipe("local-cpu").engine.device == "cpu"


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_names_its_source(name: str) -> None:
    text = (SHIPPED_SERVE / f"{name}.yaml").read_text()
    assert text.startswith("# "), "the first comment is what spec serve --list prints"
    figures = [line for line in text.splitlines() if re.match(r"\s+\w+: -?[\d.]+\b", line)]
    assert figures
    bare = [line for line in figures if "# " not in line]
    # A comment above a figure counts, too.
    lines = text.splitlines()
    assert [line for line in bare if "#" not in lines[lines.index(line) - 1]] == []


def test_found_by_name_path_and_from_the_root(tmp_path: Path) -> None:
    for name in ("kimi-k2.6-b200-tp4", "recipes/serve/kimi-k2.6-b200-tp4.yaml"):
        assert find_recipe(name, SHIPPED_SERVE).name == "kimi-k2.6-b200-tp4.yaml"
    own = tmp_path / "own.yaml"
    own.write_text("target: {path: a/b}\ndraft: {path: c/d}\nsmoke: {floor: 1.5}\n")
    assert load_serve_recipe(own).smoke.floor == 1.5
    with pytest.raises(ValueError, match=r"no recipe 'tiny' \(it is a recipe of `spec train`\)"):
        find_recipe("tiny", SHIPPED_SERVE)
    with pytest.raises(ValueError, match=r"no recipe 'kimi': .* kimi-k2.6-b200-tp4, "):
        load_serve_recipe("kimi")


def test_overrides_by_key() -> None:
    changes = [
        "draft.path=./drafter",
        "engine.hicache.gigabytes=500",
        "engine.hicache.ratio=null",
        "smoke.floor=3",
    ]
    found = load_serve_recipe("kimi-k2.6-b200-tp8", changes)
    assert (found.draft.path, found.smoke.floor) == ("./drafter", 3.0)
    assert found.engine.hicache is not None
    assert (found.engine.hicache.gigabytes, found.engine.hicache.ratio) == (500, None)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.tensor_paralel=4", "unknown key .* nearest is 'engine.tensor_parallel'"),
        ("draft.block_size=8", "unknown key 'draft.block_size'; nearest is "),
        ("engine.hicache.gigabytes=500", "engine.hicache has a ratio and gigabytes; keep one"),
        ("smoke.floor=0.5", "smoke.floor: .* greater than or equal to 1"),
        ("draft.sts=sts.json", "draft.sts is a key of dspark; set draft.algorithm=dspark"),
        ("draft.algorithm=dspark", "draft.window has no effect with dspark"),
        ("draft.quantization=unquant", "draft.quantization: .*'none', 'compressed-tensors' or"),
    ],
)
def test_mistakes_in_one_line(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        load_serve_recipe("kimi-k2.6-b200-tp8", [override])


def test_an_unknown_key_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text("target: {path: a/b}\ndraft: {path: c/d, windw: 9}\nsmoke: {floor: 1.5}\n")
    with pytest.raises(ValueError, match=r"unknown key 'draft.windw'; nearest is 'draft.window'"):
        load_serve_recipe(path)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("engine.host=--tp", "engine.host: found '--tp'; expected a host's name or address"),
        ("engine.host=''", "engine.host: found ''; expected a host's name"),
        ("engine.host='[::1]'", "engine.host: found"),
        ("engine.host=http://a", "engine.host: found"),
        ("draft.path=''", "draft.path: found ''; expected a name or path"),
        ("draft.path=--tp", "draft.path: found '--tp'; expected"),
        ("target.path=' '", "target.path: found ' '; expected"),
        ("engine.served_name=-x", "engine.served_name: found '-x'; expected"),
        ("engine.environment={A=B: x}", "engine.environment: found 'A=B'; expected names of"),
        ("engine.environment={'': x}", "engine.environment: found ''; expected names of"),
        ("engine.environment={A: true}", "engine.environment.A: Input should be a valid string"),
        ("engine.environment=1", "engine.environment: Input should be"),
    ],
)
def test_what_would_be_no_word_of_the_command_line(override: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        load_serve_recipe("kimi-k2.6-b200-tp8", [override])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("host", ["::1", "0.0.0.0", "gpu-7.example.com", "fe80::1%eth0"])
def test_hosts(host: str) -> None:
    assert load_serve_recipe("local-cpu", [f"engine.host='{host}'"]).engine.host == host


def test_text_of_digits_and_variables(tmp_path: Path) -> None:
    """The cure of the context rule is taken as it is written there, and without its quotes."""
    path = tmp_path / "own.yaml"
    path.write_text(
        "target: {path: '2024'}\ndraft: {path: '1e-4'}\nsmoke: {floor: 15e-1}\n"
        "engine: {served_name: '7', environment: {A: 1, B: '1e3', C: text}}\n"
    )
    own = load_serve_recipe(path)
    assert (own.target.path, own.draft.path, own.engine.served_name) == ("2024", "1e-4", "7")
    assert own.smoke.floor == 1.5
    assert own.engine.environment == {"A": "1", "B": "1e3", "C": "text"}
    for one in ("'1'", "1"):
        cure = f"engine.environment={{{LONGER}: {one}}}"
        assert load_serve_recipe(path, [cure]).engine.environment == {LONGER: "1"}
