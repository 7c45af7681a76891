"""The parity gate on the real engine: every request's histogram equal to ours, or named why not.

One start of the engine a drafter, and one for the plain answers that all of them share.
"""

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trained_draft
from engine_env import engine_python
from test_export_broken import renamed

from spec.cli import main as cli
from spec.data.prompts import Prompt, read_prompts
from spec.dflash.fp8 import Quantization
from spec.export.engine_runs import Plain, measure, run_plain
from spec.export.fp8 import quantize_draft
from spec.export.plan import Plan
from spec.export.verify import Verification, verify
from spec.target.engine import Engine, EngineError, free_port
from spec.target.launch import Launch

pytestmark = [pytest.mark.engine, pytest.mark.slow]

PROMPTS = 12


def silent(_line: str) -> None: ...


def asked() -> list[Prompt]:
    return read_prompts(trained_draft.prompt_file())[:PROMPTS]


def plan(directory: Path, logs: Path, **changes: Any) -> Plan:
    options: dict[str, Any] = {"probe": False, "max_new_tokens": 48, **changes}
    target = str(trained_draft.target_directory())
    return Plan(directory, directory.name, target, engine_python(), logs, **options)


@cache
def plain() -> Plain:
    logs = trained_draft.folder() / "plain"
    one = plan(trained_draft.trained_draft("dflash"), logs)
    return run_plain(one, measure(one, asked(), silent), silent)


def verified(directory: Path, logs: Path, **changes: Any) -> Verification:
    return verify(plan(directory, logs, **changes), asked(), tell=silent, plain=plain())


def assert_equal(result: Verification, accepts: float) -> None:
    """Every pass, every request: text as plain, histogram as ours."""
    assert result.findings == [] and result.passed, result.findings
    assert all(layer.error <= 1e-5 for layer in result.layers)
    for each in result.passes:
        assert each.num_equal_text == each.num_equal_histogram == each.num_requests == PROMPTS
        assert each.acceptance_length == each.acceptance_length_ours > accepts
    single, batched, cached = result.passes
    assert single.cached_tokens < cached.cached_tokens and batched.name == "batched"


@pytest.mark.parametrize("kind", trained_draft.KINDS)
def test_each_requests_histogram_is_ours(kind: str, tmp_path: Path) -> None:
    assert_equal(verified(trained_draft.trained_draft(kind), tmp_path), accepts=1.5)


def test_under_tensor_parallelism(tmp_path: Path) -> None:
    result = verified(trained_draft.trained_draft("rnn"), tmp_path, tensor_parallel=2)
    assert_equal(result, accepts=1.5)


def test_an_fp8_drafter_accepts_what_our_evaluator_says(tmp_path: Path) -> None:
    """Its activations are rounded: a value on the edge of a step may fall to either side."""
    draft = trained_draft.trained_draft("dflash")
    quantize_draft(draft, tmp_path / "fp8", Quantization("channel"), name="toy", gate=None)
    result = verified(tmp_path / "fp8", tmp_path, tolerance=0.05)
    assert result.passed
    for each in result.passes:
        assert each.num_equal_text == PROMPTS
        assert each.num_equal_histogram >= PROMPTS - 1
        assert each.acceptance_length > 1.5


def test_heads_that_the_engine_does_not_find_have_a_pattern(tmp_path: Path) -> None:
    """We read the right directory, the engine one whose head it ignores without a word."""
    right = trained_draft.trained_draft("vanilla")
    broken = shutil.copytree(right, tmp_path / "broken")
    renamed("markov_head.", "sequential_head.")(broken)
    other = ("--speculative-draft-model-path", str(broken))
    result = verified(right, tmp_path, engine_arguments=other)
    assert not result.passed
    assert all(each.num_equal_text == PROMPTS for each in result.passes), "text never tells"
    (found,) = result.findings
    assert "the engine accepts" in found.what and "is right" in found.what


def test_a_drafter_that_the_engine_refuses_is_a_report(tmp_path: Path) -> None:
    other = ("--speculative-num-draft-tokens", "5")
    result = verified(
        trained_draft.trained_draft("vanilla"), tmp_path, engine_arguments=other, timeout=300
    )
    assert not result.passed and result.passes == []
    assert "before it was ready" in result.findings[0].what


def test_the_verb_writes_a_report_and_fails_on_a_broken_drafter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """spec check alone finds it: no engine is started."""
    broken = shutil.copytree(trained_draft.trained_draft("vanilla"), tmp_path / "broken")
    renamed("markov_head.", "sequential_head.")(broken)
    target = str(trained_draft.target_directory())
    words = ["verify", str(broken), "-t", target, "-p", str(trained_draft.prompt_file())]
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--python", engine_python(), "-o", str(tmp_path / "out"), "--json"])
    assert stop.value.code == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "out" / "verify.json").read_text())
    assert not printed["passed"] and printed["passes"] == {}
    assert any("markov_head" in each["what"] for each in printed["findings"])


def test_an_engine_without_sglang_is_one_line(tmp_path: Path) -> None:
    launch = Launch("/usr/bin/env", ("--model-path", "x"), port=free_port())
    with (
        pytest.raises(EngineError, match="ended with exit code"),
        Engine(launch, log=tmp_path / "log", timeout=30),
    ):
        pass
