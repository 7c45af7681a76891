"""spec serve on the command line, without an engine."""

from pathlib import Path

import pytest
from serve_models import drafter, target
from typer.testing import CliRunner, Result

from spec.cli.main import app


@pytest.fixture(autouse=True)
def no_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("SPEC_ENGINE_PYTHON", raising=False)
    monkeypatch.chdir(tmp_path)  # where no .venv-sglang lies


def run(*words: object) -> Result:
    return CliRunner().invoke(app, ["serve", *map(str, words)])


def test_print_without_network_models_or_engine() -> None:
    done = run("--recipe", "kimi-k2.6-b200-tp4", "--print", "engine.port=8000")
    assert done.exit_code == 0
    command = done.stdout
    assert command.startswith("python -m sglang.launch_server \\\n  --model-path nvidia/Kimi-K2.6")
    assert "--tp-size 4 \\\n" in command and command.rstrip().endswith("--port 8000")
    told = done.stderr.splitlines()
    assert [line.split(" is not on")[0] for line in told[:4:2]] == [
        "spec: note (SGLang): target.path nvidia/Kimi-K2.6-NVFP4",
        "spec: note (SGLang): draft.path drafters/kimi-k2.6-dflash-fp8",
    ]
    assert told[4:] == [
        "spec: not shown to the engine: give --python PATH of an environment that has sglang"
    ]


def test_a_defect_is_told_and_ends_with_one(tmp_path: Path) -> None:
    pair = [f"target.path={target(tmp_path / 't')}", f"draft.path={drafter(tmp_path / 'd')}"]
    done = run("-r", "qwen3-8b", "--print", *pair)
    assert done.exit_code == 1
    assert "spec: defect (SGLang): draft.num_draft_tokens is 15" in done.stderr
    assert "spec:   -> set draft.num_draft_tokens=3" in done.stderr
    assert "--speculative-num-draft-tokens 16" in done.stdout  # what was asked for
    good = run("-r", "qwen3-8b", "--print", *pair, "draft.num_draft_tokens=null")
    assert good.exit_code == 0, good.stderr
    assert "--speculative-num-draft-tokens 4" in good.stdout


def test_nothing_starts_without_an_engine(tmp_path: Path) -> None:
    done = run("-r", "kimi-k2.6-b200-tp8")
    assert isinstance(done.exception, ValueError)
    assert "make engine builds one for a CPU" in str(done.exception)


def test_a_mistyped_directory_stops_it_but_not_the_printing(tmp_path: Path) -> None:
    paths = [f"target.path={target(tmp_path / 't')}", "draft.path=runs/tiny/drfat"]
    done = run("-r", "local-cpu", "--python", "python", *paths)
    assert done.exit_code == 1
    assert done.stderr.splitlines()[0] == (
        "spec: defect (SGLang): draft.path runs/tiny/drfat: no such directory"
    )
    printed = run("-r", "local-cpu", "--print", *paths)
    assert printed.exit_code == 0
    assert "spec: note (SGLang): draft.path runs/tiny/drfat: no such directory" in printed.stderr
    assert "--speculative-draft-model-path runs/tiny/drfat" in printed.stdout


def test_listing() -> None:
    shown = run("--list").stdout.splitlines()
    assert [line.split()[0] for line in shown] == [
        *("glm-5.2", "kimi-k2.6-b200-tp4", "kimi-k2.6-b200-tp8", "local-cpu", "qwen3-8b")
    ]
    assert shown[1].endswith("token ids.")
    keys = run("--keys").stdout
    assert "engine.hicache.write_policy" in keys and "draft.quantization" in keys


def test_it_asks_for_a_recipe() -> None:
    assert "spec serve --list shows the names" in str(run().exception)
    assert "nearest is 'draft.window'" in str(
        run("-r", "kimi-k2.6-b200-tp8", "draft.windo=1").exception
    )
