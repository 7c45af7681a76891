"""The verbs that work on data, end to end on a tiny target."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from spec.cli.main import app
from spec.data.rows import read_rows
from spec.target.model import load_tokenizer
from spec.target.tiny import make_tiny_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_target(tmp_path_factory.mktemp("cli") / "target", steps=2)


def run(*arguments: str | Path) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_inspect_prints_json(target: Path) -> None:
    facts = json.loads(run("inspect", target, "--json"))
    assert facts["supported"] is True
    assert facts["name"] == "target"


def test_prepare_writes_rows_and_says_how_many(target: Path, tmp_path: Path) -> None:
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    chats.write_text(json.dumps({"id": "a", "messages": turns}) + "\n")
    out = tmp_path / "rows.jsonl"
    told = json.loads(run("prepare", "-t", target, "-c", chats, "-o", out, "--json"))
    assert told["num_kept"] == 1
    # "4" and the end-of-turn token.
    assert [row.num_supervised for row in read_rows(out).rows] == [2]


@pytest.mark.parametrize("allowed", [False, True])
def test_prepare_passes_on_whether_remote_code_may_run(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool
) -> None:
    seen: list[bool] = []

    def load(directory: Path, *, trust_remote_code: bool = False) -> object:
        seen.append(trust_remote_code)
        return load_tokenizer(directory)

    monkeypatch.setattr("spec.data.conversations.load_tokenizer", load)
    chats = tmp_path / "chats.jsonl"
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    chats.write_text(json.dumps({"messages": turns}) + "\n")
    options = ("--trust-remote-code",) if allowed else ()
    run("prepare", "-t", target, "-c", chats, "-o", tmp_path / "rows.jsonl", *options)
    assert seen == [allowed]


def test_regenerate_goes_on_where_it_was(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    options = ("-t", target, "-p", "tiny", "-o", out, "--max-new-tokens", "3", "--json")
    assert json.loads(run("regenerate", *options, "--limit", "2"))["num_new"] == 2
    told = json.loads(run("regenerate", *options, "--limit", "3"))
    assert (told["num_new"], told["num_skipped"]) == (1, 2)


def test_eval_groups_prompts_and_sets_drafters_side_by_side(target: Path, tmp_path: Path) -> None:
    tagged, plain = tmp_path / "tagged.jsonl", tmp_path / "plain.jsonl"
    tagged.write_text(json.dumps({"turns": ["sum of two"], "tag": "code"}) + "\n")
    plain.write_text(json.dumps({"turns": ["hello"]}) + "\n")
    prompts = ("-p", tagged, "-p", plain)
    drafts = ("-d", "ngram", "-d", "ngram", "--num-draft-tokens", "3")
    out = tmp_path / "report"
    shown = run("eval", "-t", target, *drafts, *prompts, "-o", out, "--max-new-tokens", "8")
    report = json.loads((out / "report.json").read_text())
    assert set(report["groups"]) == {"all", "code", "plain"}
    assert report["num_draft_tokens"] == 3
    assert report["groups"]["all"]["equal_to_plain"] == 1.0
    assert [other["draft"] for other in report["comparisons"]] == ["ngram"]
    assert "| code |" in shown
    assert {path.name for path in out.iterdir()} == {"report.json", "report.md", "acceptance.png"}
