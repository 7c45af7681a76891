"""The command line: help with examples, exit codes, errors in one line."""

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from spec.cli import main as cli
from spec.cli import show

VERBS = [
    "calibrate",
    "card",
    "check",
    "eval",
    "export",
    "import",
    "inspect",
    "plan",
    "prepare",
    "quantize",
    "recipes",
    "regenerate",
    "serve",
    "train",
    "verify",
]


def run(*arguments: str) -> int:
    """The exit code of `spec` with these arguments."""
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    code = stop.value.code
    assert code is None or isinstance(code, int)
    return code or 0


def test_every_verb_is_listed() -> None:
    result = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    listed = [line.split()[1] for line in result.output.splitlines() if line.startswith("│ ")]
    assert sorted(word for word in listed if not word.startswith("-")) == VERBS


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(verb: str) -> None:
    result = CliRunner().invoke(cli.app, [verb, "--help"], env={"COLUMNS": "200"})
    assert result.exit_code == 0
    assert f"Example: spec {verb}" in result.output


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    name, number = capsys.readouterr().out.split()
    assert name == "spec"
    assert number[0].isdigit()


@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "no/such/directory/anywhere"),
        ("train", "--recipe", "no-such-recipe"),
        ("train", "--recipe", "tiny", "no.such.key=1"),
        ("eval", "-t", "no/such/dir/", "-d", "ngram", "-p", "missing.jsonl", "-o", "out"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SPEC_TRACEBACK", raising=False)
    assert run(*arguments) == 2
    shown = capsys.readouterr()
    assert shown.err.startswith("spec: ")
    assert shown.err.count("\n") == 1
    assert "Traceback" not in shown.err + shown.out
    assert list(tmp_path.iterdir()) == []


def test_the_traceback_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPEC_TRACEBACK", "1")
    with pytest.raises(ValueError, match="no/such/directory"):
        cli.main(["inspect", "no/such/directory/anywhere"])


def test_a_defect_of_ours_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect() -> None:
        raise AssertionError("ours")

    monkeypatch.setattr(show, "shipped_recipes", defect)
    with pytest.raises(AssertionError, match="ours"):
        cli.main(["recipes"])


def test_control_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "shipped_recipes", interrupt)
    assert run("recipes") == 130


def test_unknown_options_and_verbs_exit_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", "--no-such-option", "x") == 2
    assert run("no-such-verb") == 2
    assert "Traceback" not in capsys.readouterr().err


def test_recipes_have_a_description_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("recipes") == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split()[0] for line in lines]
    assert {"quickstart", "tiny"} <= set(names)
    assert all(len(line.split()) > 3 for line in lines)


def test_train_prints_the_resolved_recipe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("train", "--recipe", "tiny", "out=elsewhere", "--print") == 0
    assert "\nout: elsewhere\n" in "\n" + capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_records_as_lines_and_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"num_layers": 30, "tied": True, "bytes": 1234567, "ids": (1, 14), "scale": None}
    show.record(value, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "num layers  30",
        "tied        yes",
        "bytes       1,234,567",
        "ids         1, 14",
        "scale       none",
    ]
    show.record(value, as_json=True)
    assert json.loads(capsys.readouterr().out)["ids"] == [1, 14]


def test_a_warning_is_one_line_on_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def warn() -> list[tuple[str, str]]:
        warnings.warn("first\n  second", stacklevel=1)
        return []

    monkeypatch.setattr(show, "shipped_recipes", warn)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        # What pytest puts in its place only collects.
        monkeypatch.setattr(warnings, "showwarning", print_warning)
        assert run("recipes") == 0
    assert capsys.readouterr().err == "spec: warning: first second\n"


def print_warning(message: Warning | str, *details: Any) -> None:
    print(warnings.formatwarning(message, *details[:3]), end="", file=sys.stderr)  # pyright: ignore[reportArgumentType, reportCallIssue]


def test_an_error_of_many_lines_becomes_one() -> None:
    assert show.one_line(ValueError("first\n  second")) == "first second"
    assert show.one_line(ValueError()) == "ValueError"
