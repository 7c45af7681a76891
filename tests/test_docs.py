"""The documentation names only verbs, options, recipe keys, files and links that exist."""

import itertools
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spec.cli.main import app
from spec.recipes.load import SHIPPED, known_keys, load_recipe
from spec.serve.recipe import SHIPPED_SERVE, ServeRecipe, load_serve_recipe

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
GROUPS = ["plan"]  # verbs with a second word
KEYS = {*known_keys(), *known_keys(ServeRecipe)}
SECTIONS = {key.split(".")[0] for key in KEYS if "." in key}
RECIPES = {"train": (SHIPPED, load_recipe), "serve": (SHIPPED_SERVE, load_serve_recipe)}


def commands(text: str) -> list[list[str]]:
    """The words of each `spec` command in the text's bash blocks."""
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    words = [shlex.split(line, comments=True) for line in lines]
    starts = [
        next((i for i, word in enumerate(w) if Path(word).name == "spec"), None) for w in words
    ]
    found = [w[i + 1 :] for w, i in zip(words, starts, strict=True) if i is not None]
    # What stands after -- is another program's.
    return [w[: w.index("--")] if "--" in w else w for w in found]


def options_of(words: list[str]) -> str:
    verb = words[:2] if words[0] in GROUPS else words[:1]
    result = CliRunner().invoke(app, [*verb, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0, f"no verb {verb}"
    return result.output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    for words in commands(page.read_text()):
        if words[0].startswith("-"):
            continue
        known = set(re.findall(r"(?<![\w-])-{1,2}[a-z][a-z-]*", options_of(words)))
        used = {word.split("=")[0] for word in words[1:] if word.startswith("-")}
        assert used <= known, f"{page.name}: {words}: {used - known}"
        recipe = next((b for a, b in itertools.pairwise(words) if a in ("-r", "--recipe")), None)
        if words[0] in RECIPES and recipe is not None:
            shipped, load = RECIPES[words[0]]
            overrides = [word for word in words[1:] if re.match(r"[a-z_.]+=", word)]
            # A name may have a point: no suffix is one but .yaml.
            if (shipped / f"{Path(recipe).name.removesuffix('.yaml')}.yaml").exists():
                load(recipe, overrides)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipe_keys_exist(page: Path) -> None:
    named = set(re.findall(r"`([a-z]+\.[a-z_]+)(?:=[^`]*)?`", page.read_text()))
    mentioned = {key for key in named if key.split(".")[0] in SECTIONS}
    # `train.py` and the like are files, not keys.
    assert {key for key in mentioned if not key.endswith((".py", ".md"))} <= KEYS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_page_is_reachable_from_the_readme() -> None:
    readme = PAGES[0].read_text()
    missing = [page.name for page in PAGES[2:] if f"(docs/{page.name})" not in readme]
    assert not missing
