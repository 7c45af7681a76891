"""spec card on the command line, and the cards that other verbs leave."""

import json
from pathlib import Path

import pytest
from test_export_card import record, report, words
from toy_drafter import dflash_config, dspark_config, saved
from typer.testing import CliRunner

from spec.cli.card import leave_card
from spec.cli.main import app
from spec.export.card import is_ours, write_card


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    directory = saved(tmp_path / "run" / "draft", dspark_config())
    record(directory, acceptance_report=report("dspark", 4))
    return directory


def run(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)
    return result.stdout


def test_print_writes_nothing(draft: Path) -> None:
    shown = run("card", draft, "--print", "--license", "mit")
    assert shown.startswith("---\nbase_model: Org/Model-1B\n") and "license: mit" in shown
    assert not (draft / "README.md").exists()


def test_a_card_is_written_where_it_belongs_or_where_asked(draft: Path, tmp_path: Path) -> None:
    assert run("card", draft) == f"wrote {draft / 'README.md'}\n"
    told = json.loads(run("card", draft, "-o", tmp_path / "card.md", "--json"))
    assert told["library_name"] == "sglang"
    assert (tmp_path / "card.md").read_bytes() == (draft / "README.md").read_bytes()


def test_force_and_reports(draft: Path, tmp_path: Path) -> None:
    (draft / "README.md").write_text("mine")
    result = CliRunner().invoke(app, ["card", str(draft)])
    assert isinstance(result.exception, ValueError) and "--force" in str(result.exception)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(report("dspark", 4, temperature=1.0)))
    run("card", draft, "--force", "--report", path)
    assert "temperature 1, seed 0" in (draft / "README.md").read_text()


@pytest.mark.parametrize("to", ["sglang", "vllm"])
def test_exports_carry_a_card_of_their_own(draft: Path, tmp_path: Path, to: str) -> None:
    write_card(draft, license="mit")
    out = tmp_path / "made"
    run("export", "-d", draft, "--to", to, "-o", out)
    text = (out / "README.md").read_text()
    assert is_ours(out / "README.md") and "license: mit" in text
    served = json.loads(words(text, "vllm serve")[4])
    assert served["model"] == ("DRAFTER" if to == "vllm" else "CONVERTED")
    assert served["num_speculative_tokens"] == 4
    command = words(text, "python -m sglang.launch_server")
    assert command[command.index("--speculative-num-draft-tokens") + 1] == "5"
    run("import", out, "-o", tmp_path / "back")
    back = (tmp_path / "back" / "README.md").read_text()
    assert "license: mit" in back and "| layout | sglang (native" in back


def test_a_hand_written_card_stays_with_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = saved(tmp_path / "draft", dflash_config())
    (directory / "README.md").write_text("mine")
    leave_card(directory)
    assert (directory / "README.md").read_text() == "mine"
    assert "changed by hand and stays" in capsys.readouterr().err
    (directory / "README.md").unlink()
    leave_card(directory)
    assert is_ours(directory / "README.md")


def test_a_card_that_cannot_be_made_fails_no_verb(draft: Path, tmp_path: Path) -> None:
    (draft / "spec.json").write_text("{")
    out = tmp_path / "made"
    with pytest.warns(UserWarning, match=rf"no card: .*is no JSON.*spec card {out} then writes it"):
        shown = run("export", "-d", draft, "--to", "sglang", "-o", out)
    assert f"wrote {out}: read back equal" in shown and not (out / "README.md").exists()
