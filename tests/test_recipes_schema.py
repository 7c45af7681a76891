"""Recipes are strict, overridable, and complete once resolved."""

from pathlib import Path

import pytest
import yaml

from spec.recipes.load import SHIPPED, load_recipe
from spec.train.loop import train

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
        ("train.steps", "not key=value; write train.steps=VALUE"),
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
    recipe = load_recipe(recipe_file, ["train.epochs=3"])
    assert (recipe.train.steps, recipe.train.epochs) == (None, 3)


@pytest.mark.parametrize("text", ["", "- a\n", "out: [\n"])
def test_not_a_recipe(tmp_path: Path, text: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match="bad.yaml"):
        load_recipe(path)


def test_an_unknown_recipe_lists_the_shipped_ones() -> None:
    with pytest.raises(ValueError, match="quickstart"):
        load_recipe("nonsense")


def test_dspark_fills_in_the_papers_settings(recipe_file: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_file, ["draft.algorithm=dspark", "loss.l1=0.5"])
    draft, loss = recipe.draft, recipe.loss
    assert (draft.markov_rank, draft.markov_head_type) == (256, "vanilla")
    assert (draft.confidence_head, draft.confidence_head_with_markov) == (True, True)
    assert (loss.ce, loss.l1, loss.renyi, loss.confidence) == (0.1, 0.5, 0.0, 1.0)
    assert recipe.teacher == "last"
    again = tmp_path / "again.yaml"
    again.write_text(recipe.to_yaml())
    assert load_recipe(again) == recipe


@pytest.mark.parametrize(
    "overrides",
    [
        ["draft.markov_rank=0"],
        ["draft.markov_rank=0", "draft.confidence_head=false"],
        ["draft.confidence_head=false"],
        ["draft.confidence_head_with_markov=false"],
        *(["draft.markov_head_type=" + kind] for kind in ("vanilla", "gated", "rnn")),
        ["loss.ce=0", "loss.l1=0", "loss.renyi=1", "loss.weighting=dpace"],
    ],
)
def test_heads_and_terms_that_go_together(recipe_file: Path, overrides: list[str]) -> None:
    recipe = load_recipe(recipe_file, ["draft.algorithm=dspark", *overrides])
    assert (recipe.loss.confidence == 0) == (recipe.draft.confidence_head is False)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["draft.markov_rank=4"], "draft.markov_rank is a key of dspark"),
        (["loss.l1=0.9"], "loss.l1 is a key of dspark"),
        (["draft.algorithm=dspark", "draft.markov_rank=513"], "less than or equal to 512"),
        (
            ["draft.algorithm=dspark", "draft.markov_rank=0", "draft.markov_head_type=rnn"],
            "needs a draft.markov_rank above 0",
        ),
        (
            [
                "draft.algorithm=dspark",
                "draft.markov_rank=0",
                "draft.confidence_head_with_markov=true",
            ],
            "confidence_head_with_markov needs",
        ),
        (["draft.algorithm=dspark", "loss.confidence=0"], "a head that is not trained"),
        (["draft.algorithm=dspark", "loss.ce=0", "loss.l1=0"], "nothing to learn"),
        (["draft.algorithm=eagle"], "'dflash' or 'dspark'"),
        (["draft.init_from=d", "draft.num_layers=3"], "draft.num_layers has no effect"),
    ],
)
def test_heads_and_terms_that_do_not(recipe_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        load_recipe(recipe_file, overrides)
    assert "\n" not in str(error.value)


def test_a_warm_start_beside_a_shipped_recipe_brings_its_own_shape() -> None:
    recipe = load_recipe("tiny", ["draft.init_from=some/drafter", "train.schedule=constant"])
    assert recipe.draft.init_from == "some/drafter"
    assert recipe.draft.block_size == 16  # the default, which nothing reads
    with pytest.raises(ValueError, match="draft.block_size has no effect"):
        load_recipe("tiny", ["draft.init_from=some/drafter", "draft.block_size=4"])
    recipe = load_recipe("quickstart-dspark", ["draft.init_from=some/drafter"])
    assert recipe.draft.algorithm == "dspark"


def test_a_key_given_twice_is_a_mistake(recipe_file: Path) -> None:
    recipe_file.write_text(MINIMAL + "draft: {num_layers: 2, num_layers: 3}\n")
    with pytest.raises(ValueError, match="'num_layers' occurs twice"):
        load_recipe(recipe_file)


def test_a_recipe_that_cannot_run_says_why() -> None:
    recipe = load_recipe("deepseek-v4-flash-dspark")
    with pytest.raises(ValueError, match="bundles its drafter"):
        train(recipe)


def test_dspark_is_a_few_lines_from_dflash() -> None:
    one, other = (
        set((SHIPPED / f"{name}.yaml").read_text().splitlines())
        for name in ("quickstart", "quickstart-dspark")
    )
    assert len(one ^ other) <= 12
