"""Every shipped recipe against the real engine's own argument check, as if on a GPU machine.

ServerArgs reads config.json of both models in many places, so each recipe gets a small target of
the right architecture and a drafter that fits it.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_env import engine_python
from serve_models import BLOCKS, QWEN3, drafter, recipe, target

from spec.dflash.fp8 import Quantization
from spec.export.fp8 import quantize_draft
from spec.serve.command import draft_quantization, launch
from spec.serve.models import look_at_models
from spec.serve.recipe import ServeRecipe, load_serve_recipe
from spec.serve.rules import examine
from spec.serve.validate import Verdict, validate

pytestmark = [pytest.mark.engine, pytest.mark.slow]

# Eight ranks divide the heads; 128 x 128 blocks divide every projection.
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 16,
}
LATENT: dict[str, Any] = {  # what DeepSeek V3 and its relatives need
    **{k: v for k, v in QWEN3.items() if k != "head_dim"},
    **{k: v for k, v in SHAPE.items() if k != "head_dim"},
    "moe_intermediate_size": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 262144,
}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "dtype": "bfloat16",
    "text_config": {
        **LATENT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "quantization_config": NVFP4,
    },
    "vision_config": {},
}
GLM: dict[str, Any] = {
    **LATENT,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "index_topk": 2048,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "quantization_config": BLOCKS,
}
TARGETS: dict[str, dict[str, Any]] = {
    "kimi-k2.6-b200-tp4": KIMI,
    "kimi-k2.6-b200-tp8": KIMI,
    "glm-5.2": GLM,
    "qwen3-8b": {**QWEN3, **SHAPE},
    "local-cpu": {**QWEN3, **SHAPE, "dtype": "float32"},
}

Pair = Callable[[str], tuple[Path, Path]]


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    """Target and drafter of a recipe, the drafter quantized as the recipe says."""

    def make(name: str) -> tuple[Path, Path]:
        shipped = load_serve_recipe(name)
        model = target(tmp_path / "target", TARGETS[name])
        drafts = shipped.draft.num_draft_tokens or 3
        shape = {**SHAPE, "max_position_embeddings": 262144, "block_size": drafts + 1}
        draft = drafter(tmp_path / "draft", **shape)
        return model, quantized(draft, shipped.draft.quantization or "none")

    return make


def quantized(draft: Path, quantization: str) -> Path:
    scheme = {"compressed-tensors": "channel", "fp8": "block"}.get(quantization)
    if scheme is None:
        return draft
    out = draft.parent / scheme
    torch.manual_seed(0)
    quantize_draft(draft, out, Quantization(scheme), name="toy", gate=None)  # pyright: ignore[reportArgumentType]
    return out


def ask(wanted: ServeRecipe) -> Verdict:
    """The engine's verdict on a recipe that our own rules pass."""
    models = look_at_models(wanted)
    assert [each for each in examine(wanted, models) if each.severity == "defect"] == []
    start = launch(wanted, models, engine_python())
    return validate(start, draft_quantization(wanted, models), wanted.engine)


def shipped(name: str, pair: tuple[Path, Path], *overrides: str) -> ServeRecipe:
    paths = [f"target.path={pair[0]}", f"draft.path={pair[1]}"]
    return load_serve_recipe(name, [*paths, *overrides])


@pytest.mark.parametrize("name", TARGETS)
def test_shipped_recipes_are_accepted(name: str, pair: Pair) -> None:
    wanted = shipped(name, pair(name))
    verdict = ask(wanted)
    assert verdict.accepted, verdict.words
    assert verdict.line().startswith(f"accepted by SGLang {verdict.version}'s ServerArgs")
    resolved, draft = verdict.resolved, wanted.draft
    assert resolved["num_draft_tokens"] == (draft.num_draft_tokens or 3) + 1
    if draft.attention_backend is not None:
        assert resolved["draft_attention_backend"] == draft.attention_backend
    assert resolved["max_running_requests"] == wanted.engine.max_running_requests
    quantization = {"kimi": "modelopt_fp4", "glm-": "fp8"}.get(name[:4])
    assert resolved["quantization"] == quantization


def test_blocks_beside_nvfp4(pair: Pair) -> None:
    """Left to itself the engine would read the drafter's FP8 blocks as NVFP4."""
    model, draft = pair("kimi-k2.6-b200-tp8")
    blocks = quantized(draft, "fp8")
    # The toy's heads are one block wide, on one rank only.
    changes = ("draft.quantization=fp8", "engine.tensor_parallel=1")
    wanted = shipped("kimi-k2.6-b200-tp8", (model, blocks), *changes)
    verdict = ask(wanted)
    assert verdict.accepted and verdict.resolved["draft_quantization"] == "fp8"
    start = launch(wanted, look_at_models(wanted), engine_python())
    words = list(start.arguments)
    at = words.index("--speculative-draft-model-quantization")
    silent = type(start)(start.python, tuple(words[:at] + words[at + 2 :]))
    said = validate(silent, "fp8", wanted.engine)
    assert said.words == "it would read the drafter as modelopt_fp4, draft.quantization is fp8"


def test_attention_data_parallel(pair: Pair) -> None:
    changed = "engine.attention_data_parallel=2"
    verdict = ask(shipped("kimi-k2.6-b200-tp4", pair("kimi-k2.6-b200-tp4"), changed))
    assert verdict.accepted, verdict.words


def test_dspark(tmp_path: Path) -> None:
    model = target(tmp_path / "target", {**QWEN3, **SHAPE})
    draft = drafter(tmp_path / "draft", dspark=True, **SHAPE)
    verdict = ask(recipe(model, draft, draft={"algorithm": "dspark"}))
    assert verdict.accepted and verdict.resolved["num_draft_tokens"] == 5


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        (["--no-such-option"], "unrecognized arguments: --no-such-option"),
        (["--pp-size", "2"], "only supports pp_size == 1"),
    ],
)
def test_the_engine_s_own_refusal(words: list[str], refusal: str, pair: Pair) -> None:
    wanted = shipped("qwen3-8b", pair("qwen3-8b"))
    start = launch(wanted, look_at_models(wanted), engine_python())
    refused = validate(type(start)(start.python, (*start.arguments, *words)), "none", wanted.engine)
    assert not refused.accepted
    assert refused.words is not None and refusal in refused.words and "\n" not in refused.words
    assert refused.line().startswith(f"refused by SGLang {refused.version}'s ServerArgs: ")
