"""Recipes are strict, overridable, and complete once resolved."""

from pathlib import Path

import pytest
import yaml

from spec.recipes.schema import SHIPPED, load_recipe

MINIMAL = "out: runs/x\ntarget: {path: model}\ndata: {rows: [rows.jsonl]}\ntrain: {steps: 5}\n"


@pytest.fixture
def recipe_file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(MINIMAL)
    return path


def test_every_shipped_recipe_loads_by_name_and_by_path() -> None:
    names = sorted(path.stem for path in SHIPPED.glob("*.yaml"))
    assert {"tiny", "quickstart"} <= set(names)
    for name in names:
        assert (
            load_recipe(name)
            == load_recipe(SHIPPED / f"{name}.yaml")
            == load_recipe(f"recipes/{name}.yaml")
        )


def test_a_resolved_recipe_reads_back_as_itself(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        recipe_file, ["train.lr=1e-4", "draft.target_layer_ids=[1, 3]", "wandb.project=p"]
    )
    assert (recipe.train.lr, recipe.draft.target_layer_ids) == (1e-4, [1, 3])
    again = tmp_path / "again.yaml"
    again.write_text(recipe.to_yaml())
    assert load_recipe(again) == recipe
    assert yaml.safe_load(recipe.to_yaml())["train"]["batch_size"] == recipe.train.batch_size


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.stepz=3", "unknown key 'train.stepz'; nearest is 'train.steps'"),
        ("lr=1", "unknown key 'lr'; nearest is 'train.lr'"),
        ("train.lr=fast", "train.lr"),
        ("train.lr=-1", "train.lr"),
        ("train.steps=1.5", "train.steps"),
        ("train.steps=true", "train.steps"),
        ("loss.labels=sofft", "'hard' or 'soft'"),
        ("data.rows=[]", "name at least one source of rows"),
        ("target.make=tiny", "not both"),
        ("train.steps=null", "exactly one"),
        ("train.steps", "not key=value"),
    ],
)
def test_mistakes_are_named(recipe_file: Path, override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")) as error:
        load_recipe(recipe_file, [override])
    assert "\n" not in str(error.value)


def test_an_unknown_key_in_the_file_names_the_nearest(recipe_file: Path) -> None:
    recipe_file.write_text(MINIMAL + "draft: {block_sise: 8}\n")
    with pytest.raises(
        ValueError, match="unknown key 'draft.block_sise'; nearest is 'draft.block_size'"
    ):
        load_recipe(recipe_file)


def test_minutes_replace_steps(recipe_file: Path) -> None:
    recipe = load_recipe(recipe_file, ["train.minutes=2.5"])
    assert (recipe.train.steps, recipe.train.minutes) == (None, 2.5)


@pytest.mark.parametrize("text", ["", "- a\n", "out: [\n"])
def test_not_a_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="bad.yaml"):
        load_recipe(path)


def test_an_unknown_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(ValueError, match="quickstart"):
        load_recipe("nonsense")
