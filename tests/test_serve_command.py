"""The exact command of a recipe, word by word."""

from pathlib import Path
from typing import Any

import pytest
from serve_models import BLOCKS, CHANNELS, drafter, recipe, target
from toy_drafter import edit

from spec.serve.command import launch
from spec.serve.models import look_at_models
from spec.serve.recipe import ServeRecipe


def words(recipe: ServeRecipe) -> str:
    return " ".join(launch(recipe, look_at_models(recipe), "python").arguments)


def test_a_whole_command() -> None:
    asked = recipe(
        "a/target",
        "a/drafter",
        target={"quantization": "modelopt_fp4", "trust_remote_code": True},
        draft={
            "num_draft_tokens": 7,
            "quantization": "none",
            "attention_backend": "fa4",
            "window": 4096,
        },
        engine={
            "tensor_parallel": 8,
            "attention_data_parallel": 4,
            "kv_cache_dtype": "fp8_e4m3",
            "hicache": {"ratio": 2.0},
            "arguments": ["--page-size", "64"],
            "host": "0.0.0.0",
            "port": 8000,
        },
    )
    start = launch(asked, look_at_models(asked), "/env/bin/python")
    assert " ".join(start.command) == (
        "/env/bin/python -m sglang.launch_server --model-path a/target --trust-remote-code "
        "--quantization modelopt_fp4 --device cuda --tp-size 8 --attn-dp-size 4 "
        "--enable-dp-lm-head --kv-cache-dtype fp8_e4m3 --enable-hierarchical-cache "
        "--hicache-ratio 2.0 --hicache-write-policy write_through --enable-metrics "
        "--return-input-ids --return-output-ids --speculative-algorithm DFLASH "
        "--speculative-num-draft-tokens 8 --speculative-draft-model-quantization unquant "
        "--speculative-draft-model-path a/drafter --speculative-draft-attention-backend fa4 "
        "--speculative-draft-window-size 4096 --page-size 64 --host 0.0.0.0 --port 8000"
    )
    assert start.environment == {}


@pytest.mark.parametrize(
    ("dspark", "expected"),
    [
        (False, "--speculative-algorithm DFLASH --speculative-num-draft-tokens 4"),
        (True, "--speculative-algorithm DSPARK --speculative-num-draft-tokens 5"),
    ],
)
def test_counts_of_the_drafter(dspark: bool, expected: str, tmp_path: Path) -> None:
    """Block 4 drafts 3 tokens with DFlash and 4 with DSpark; the engine counts one more."""
    draft = drafter(tmp_path / "draft", dspark=dspark)
    algorithm = {"algorithm": "dspark" if dspark else "dflash"}
    assert expected in words(recipe(target(tmp_path / "target"), draft, draft=algorithm))


@pytest.mark.parametrize(
    ("quantization", "option"),
    [
        ("none", "--speculative-draft-model-quantization unquant"),
        ("fp8", "--speculative-draft-model-quantization fp8"),
        ("compressed-tensors", None),
    ],
)
def test_quantization_of_the_drafter(quantization: str, option: str | None) -> None:
    draft: dict[str, Any] = {"num_draft_tokens": 3, "quantization": quantization}
    said = words(recipe("a/target", "a/drafter", draft=draft))
    assert option is None or option in said
    assert said.count("-quantization") == (0 if option is None else 1)


def test_quantization_by_its_config_json(tmp_path: Path) -> None:
    """The recipe is silent, the file says it; one that is not here leaves it to the engine."""
    model, draft = target(tmp_path / "target"), drafter(tmp_path / "draft")
    assert "--speculative-draft-model-quantization unquant" in words(recipe(model, draft))
    edit(draft, quantization_config=CHANNELS)
    assert "-quantization" not in words(recipe(model, draft))
    edit(draft, quantization_config=BLOCKS)
    assert "--speculative-draft-model-quantization fp8" in words(recipe(model, draft))
    elsewhere = words(recipe(model, "a/drafter"))
    assert "-quantization" not in elsewhere and "-num-draft-tokens" not in elsewhere


def test_two_ranks_without_a_gpu_get_a_core_each() -> None:
    asked = recipe("a/target", "a/drafter", engine={"device": "cpu", "tensor_parallel": 2})
    start = launch(asked, look_at_models(asked), "python")
    assert start.environment["SGLANG_CPU_OMP_THREADS_BIND"] == "0|1"
    assert "--tp-size 2" in " ".join(start.arguments)


def test_without_a_gpu() -> None:
    asked = recipe(
        "a/target",
        "a/drafter",
        draft={"num_draft_tokens": 3},
        engine={"device": "cpu", "environment": {"A": "1"}},
    )
    start = launch(asked, look_at_models(asked), "python")
    assert "--device cpu --attention-backend torch_native" in " ".join(start.arguments)
    assert "--device cuda" not in " ".join(start.arguments)
    assert start.environment["SGLANG_USE_CPU_ENGINE"] == "1" and start.environment["A"] == "1"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in start.environment


def test_dspark_files() -> None:
    draft = {"algorithm": "dspark", "num_draft_tokens": 7, "sts": "s.json", "sps": "t.json"}
    said = words(recipe("a/target", "a/drafter", draft=draft))
    assert "--speculative-dspark-confidence-sts-path s.json" in said
    assert "--speculative-dspark-sps-table-path t.json" in said
