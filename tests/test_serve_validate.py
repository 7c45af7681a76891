"""Asking the engine about a command, with stand-ins for its interpreter."""

import json
from pathlib import Path
from typing import Any

import pytest
from serve_models import recipe

from spec.serve.command import launch
from spec.serve.models import look_at_models
from spec.serve.validate import validate


def interpreter(folder: Path, *lines: str) -> str:
    path = folder / "python"
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o755)
    return str(path)


def test_an_interpreter_without_the_engine(tmp_path: Path) -> None:
    python = interpreter(tmp_path, "echo \"No module named 'sglang'\" >&2", "exit 1")
    wanted = recipe("a/b", "c/d")
    start = launch(wanted, look_at_models(wanted), python)
    with pytest.raises(ValueError, match="No module named 'sglang'.*; give the python of"):
        validate(start, "none", wanted.engine)


@pytest.mark.parametrize(
    ("engine", "kept"),
    [
        ({"device": "cpu"}, "1"),
        ({"device": "cuda"}, ""),
        ({"served_name": "cpu"}, ""),
        ({"environment": {"SGLANG_USE_CPU_ENGINE": "0"}}, "0"),  # as it starts
    ],
)
def test_the_cpu_engine_is_for_the_cpu(
    engine: dict[str, Any], kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that is called cpu is not served on one."""
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "2")
    said = {"version": "1", "words": "engine: $SGLANG_USE_CPU_ENGINE", "resolved": {}, "gpu": None}
    answer = json.dumps(said).replace('"', '\\"')
    python = interpreter(tmp_path, "cat > /dev/null", f'echo "{answer}"')
    wanted = recipe("a/b", "c/d", engine=engine)
    start = launch(wanted, look_at_models(wanted), python)
    assert validate(start, "none", wanted.engine).words == f"engine: {kept}"


def test_another_quantization_than_the_drafter_s_is_a_refusal(tmp_path: Path) -> None:
    """What the engine would read as modelopt_fp4 accepts nothing."""
    resolved = {"draft_quantization": "modelopt_fp4"}
    said = {"version": "1", "words": None, "resolved": resolved, "gpu": "blackwell"}
    python = interpreter(tmp_path, "cat > /dev/null", f"echo '{json.dumps(said)}'")
    wanted = recipe("a/b", "c/d")
    verdict = validate(launch(wanted, look_at_models(wanted), python), "fp8", wanted.engine)
    assert verdict.line() == (
        "refused by SGLang 1's ServerArgs, as on a blackwell GPU: it would read the drafter as "
        "modelopt_fp4, draft.quantization is fp8"
    )


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        ({"algorithm": "NGRAM"}, "it would take 'NGRAM' for --speculative-algorithm"),
        ({"draft_model_path": "e/f"}, "it would take 'e/f' for --speculative-draft-model-path"),
        ({"draft_model_path": None}, "it would take None for --speculative-draft-model-path"),
        ({"model_path": "e/f"}, "it would take 'e/f' for --model-path, the recipe says a/b"),
        ({"accept_threshold_single": 0.1}, "accept_threshold_single is 0.1"),
        ({"accept_threshold_acc": 0.9}, "accept_threshold_acc is 0.9"),
        ({}, None),
    ],
)
def test_what_the_engine_took_is_what_the_recipe_says(
    taken: dict[str, Any], words: str | None, tmp_path: Path
) -> None:
    resolved = {
        "model_path": "a/b",
        "draft_model_path": "c/d",
        "algorithm": "DFLASH",
        "accept_threshold_single": 1.0,
        "accept_threshold_acc": 1.0,
        **taken,
    }
    said = {"version": "1", "words": None, "resolved": resolved, "gpu": None}
    python = interpreter(tmp_path, "cat > /dev/null", f"echo '{json.dumps(said)}'")
    wanted = recipe("a/b", "c/d")
    verdict = validate(launch(wanted, look_at_models(wanted), python), "none", wanted.engine)
    assert verdict.accepted is (words is None)
    assert (words or "") in (verdict.words or "")
