"""The layout: every folder is listed, imports only go left, the command line starts light."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ORDER = ["target", "dflash", "dspark", "recipes", "data", "eval", "train", "export", "serve", "cli"]
HEAVY = ["torch", "transformers", "wandb", "deepspeed", "sglang", "matplotlib", "accelerate"]
OTHERS = {"tests", "docs", "notebooks", "benchmarks"}
# dflash and target are the ground: a drafter sees tensors, not models.
STRANGERS = [("dflash", "target"), ("target", "dflash")]


def folders() -> list[str]:
    """The library folders that exist here, in import order."""
    return [name for name in ORDER if (ROOT / name).is_dir()]


def import_errors(folder: str, path: Path, source: str) -> list[str]:
    """What breaks the import rule in one file that lies at `path`, relative to the root."""
    errors: list[str] = []
    depth = len(path.parts) - 1
    for node in ast.walk(ast.parse(source)):
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            errors += [
                f"{where}: absolute import of {alias.name}; use a relative one"
                for alias in node.names
                if alias.name.split(".")[0] in ("spec", *ORDER)
            ]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            if (node.module or "").split(".")[0] in ("spec", *ORDER):
                errors.append(f"{where}: absolute import of {node.module}; use a relative one")
        elif isinstance(node, ast.ImportFrom) and node.level > depth:
            names = [node.module] if node.module else [alias.name for alias in node.names]
            errors += [
                f"{where}: {folder} may not import {other}; imports go left only"
                for other in (name.split(".")[0] for name in names)
                if not allowed(folder, other)
            ]
    return errors


def allowed(folder: str, other: str) -> bool:
    """Whether `folder` may import `other`."""
    if (folder, other) in STRANGERS or other not in ORDER:
        return False
    return ORDER.index(other) <= ORDER.index(folder)


def test_every_folder_with_code_is_a_known_one() -> None:
    with_code = {p.parent.name for p in ROOT.glob("*/*.py") if not p.parent.name.startswith(".")}
    assert with_code - OTHERS - {"build", "dist"} <= set(ORDER)


def test_every_folder_is_listed_in_the_project_file() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    setuptools = settings["tool"]["setuptools"]
    expected = [f"spec.{name}" for name in folders()]
    assert setuptools["packages"] == expected
    assert setuptools["package-dir"] == {f"spec.{name}": name for name in folders()}
    for name in folders():
        assert (ROOT / name / "__init__.py").is_file(), f"{name}/__init__.py is missing"
    assert not (ROOT / "__init__.py").exists(), "a root __init__.py breaks editable installs"
    checked = settings["tool"]["basedpyright"]["include"]
    assert set(folders()) <= set(checked), "a folder is not type-checked"


def test_the_type_checker_sees_the_namespace() -> None:
    assert (ROOT / ".typecheck" / "spec").resolve() == ROOT


@pytest.mark.parametrize("folder", folders())
def test_imports_are_relative_and_go_left(folder: str) -> None:
    errors = [
        error
        for path in sorted((ROOT / folder).rglob("*.py"))
        for error in import_errors(folder, path.relative_to(ROOT), path.read_text())
    ]
    assert not errors, "\n".join(errors)


@pytest.mark.parametrize(
    ("path", "source", "wrong"),
    [
        ("data/rows.py", "from ..target.model import Target", 0),
        ("data/rows.py", "from .manifest import Manifest", 0),
        ("data/rows.py", "from .. import target", 0),
        ("data/rows.py", "import json", 0),
        ("data/rows.py", "from ..train.loop import train", 1),
        ("data/rows.py", "from .. import target, eval", 1),
        ("data/rows.py", "def f():\n    from ..cli import main", 1),
        ("data/rows.py", "import spec.target.model", 1),
        ("data/rows.py", "from spec.target import model", 1),
        ("data/rows.py", "from target import model", 1),
        ("dflash/block.py", "from ..target import model", 1),
        ("target/model.py", "from ..dflash import block", 1),
        ("data/deep/rows.py", "from ..rows import Row", 0),
        ("data/deep/rows.py", "from ...eval import report", 1),
    ],
)
def test_the_import_rule_itself(path: str, source: str, wrong: int) -> None:
    assert len(import_errors(path.split("/")[0], Path(path), source)) == wrong


def test_the_cli_starts_without_heavy_packages() -> None:
    code = f"import sys, spec.cli.main; print([m for m in {HEAVY} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"
