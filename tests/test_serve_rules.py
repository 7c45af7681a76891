"""Each rule on a pair of toy directories: what it says, and that the good pair passes."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serve_models import BLOCKS, QWEN3, drafter, recipe, target
from toy_drafter import edit

from spec.dflash.fp8 import Quantization
from spec.export.findings import Finding
from spec.serve.models import look_at_models, read_shape
from spec.serve.recipe import ServeRecipe
from spec.serve.rules import examine


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return target(tmp_path / "target"), drafter(tmp_path / "draft")


def findings(recipe: ServeRecipe) -> list[Finding]:
    """Those that are not notes, and not about the target's absent tokenizer and weights."""
    return [each for each in examine(recipe, look_at_models(recipe)) if each.severity != "note"]


def only(recipe: ServeRecipe, severity: str) -> str:
    """The one finding that matters, with its cure."""
    found = findings(recipe)
    assert [each.severity for each in found] == [severity], found
    return f"{found[0].what} -> {found[0].cure}"


def test_a_good_pair(pair: tuple[Path, Path], tmp_path: Path) -> None:
    assert findings(recipe(*pair)) == []
    assert findings(recipe(*pair, draft={"num_draft_tokens": 3})) == []
    assert findings(recipe(*pair, engine={"tensor_parallel": 2})) == []
    dspark = drafter(tmp_path / "dspark", dspark=True)
    same = {"algorithm": "dspark", "num_draft_tokens": 4}
    assert findings(recipe(pair[0], dspark, draft=same)) == []


def test_what_is_not_here_is_said_and_not_refused(pair: tuple[Path, Path]) -> None:
    stated = {"num_draft_tokens": 7, "quantization": "none"}
    elsewhere = recipe("some/target", "some/drafter", draft=stated)
    found = examine(elsewhere, look_at_models(elsewhere))
    assert [each.severity for each in found] == ["note", "note"]
    assert "target.path some/target is not on this machine" in found[0].what
    half = recipe("some/target", pair[1])
    assert [each.severity for each in examine(half, look_at_models(half))] == ["note"]


def test_a_directory_that_does_not_exist(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """One finding, not one more for each thing that it does not say."""
    mistyped = recipe(pair[0], tmp_path / "drfat")
    said = only(mistyped, "defect")
    assert said == (
        f"draft.path {tmp_path / 'drfat'}: no such directory -> set draft.path to a model "
        "directory or a hub id"
    )
    printed = examine(mistyped, look_at_models(mistyped, only_print=True))
    assert [each.severity for each in printed] == ["note"]
    assert "target.path ./model: no such" in only(recipe("./model", pair[1]), "defect")
    file = tmp_path / "target.gguf"
    file.touch()
    assert findings(recipe(file, pair[1])) == []


def test_findings_of_spec_check_come_along(pair: tuple[Path, Path]) -> None:
    edit(pair[1], dtype="float16")
    assert "says dtype float16, the weights are F32" in only(recipe(*pair), "defect")


def test_what_only_our_tools_cannot_read_is_served(pair: tuple[Path, Path]) -> None:
    asked = recipe(*pair)
    models = look_at_models(asked)
    assert models.draft is not None
    for reader in ("spec", "SGLang", "all"):
        found = [Finding("defect", "sliding layers", reader, "")]
        told = examine(asked, replace(models, draft=replace(models.draft, findings=found)))
        assert told == ([] if reader == "spec" else found)


def test_algorithm(pair: tuple[Path, Path]) -> None:
    found = findings(recipe(*pair, draft={"algorithm": "dspark", "num_draft_tokens": 3}))
    assert found[0].what.endswith("is dflash") and found[0].cure == "set draft.algorithm=dflash"


@pytest.mark.parametrize(
    ("asked", "dspark", "severity"),
    [(4, False, "defect"), (2, False, "warning"), (3, True, "defect"), (5, True, "defect")],
)
def test_counts(
    asked: int, dspark: bool, severity: str, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    """Block 4: DFlash drafts 3, DSpark 4; only DFlash may draft fewer."""
    draft = drafter(tmp_path / "other", dspark=dspark)
    algorithm = "dspark" if dspark else "dflash"
    asking = {"num_draft_tokens": asked, "algorithm": algorithm}
    said = only(recipe(pair[0], draft, draft=asking), severity)
    assert f"is {asked}, " in said and f"trained for {4 if dspark else 3}" in said


def test_counts_that_nobody_states(pair: tuple[Path, Path]) -> None:
    draft = {"quantization": "none"}
    said = only(recipe(pair[0], "some/drafter", draft=draft), "defect")
    assert "num_draft_tokens is not set" in said


def test_a_quantization_that_nobody_states(pair: tuple[Path, Path]) -> None:
    draft = {"num_draft_tokens": 3}
    said = only(recipe(pair[0], "some/drafter", draft=draft), "defect")
    assert "draft.quantization is not set" in said
    edit(pair[1], quantization_config={"quant_method": "gptq"})
    found = [each.what for each in findings(recipe(*pair))]
    assert any("draft.quantization is not set" in what and "says gptq" in what for what in found)


def test_layers_against_the_target(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """Reads layer 3; of five layers that is the last but one, of four the last."""
    short = target(tmp_path / "short", num_hidden_layers=4)
    said = " ".join(each.what for each in findings(recipe(short, pair[1])))
    assert "reads layers [1, 3] of a target of 4 layers" in said
    nested = {"architectures": ["Unknown"], "model_type": "no_such_type", "text_config": QWEN3}
    assert read_shape(target(tmp_path / "nested", nested)).layers == 6


def test_a_target_that_only_the_engine_knows(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = {"architectures": ["Unknown"], "model_type": "no_such_type"}
    unknown = target(tmp_path / "unknown", {**config, "text_config": QWEN3})
    asked = recipe(unknown, pair[1])
    found = examine(asked, look_at_models(asked))
    assert [each.severity for each in found] == ["note"]
    assert "was not compared with the target" in found[0].what


def test_quantization(pair: tuple[Path, Path]) -> None:
    said = only(recipe(*pair, draft={"quantization": "compressed-tensors"}), "defect")
    assert "says none: it would take over the target's quantization" in said
    assert said.endswith("-> set draft.quantization=none")
    edit(pair[1], quantization_config=BLOCKS)
    found = [each.what for each in findings(recipe(*pair, draft={"quantization": "none"}))]
    assert any("draft.quantization is none" in what and "says fp8" in what for what in found)
    silent = [each.what for each in findings(recipe(*pair))]
    assert not any("draft.quantization" in what for what in silent)


def test_context_longer_than_the_drafter_s(pair: tuple[Path, Path], tmp_path: Path) -> None:
    """The target has 4096 positions, the drafter 32768; then 2048."""
    assert "refuses to start" in only(recipe(*pair, engine={"context_length": 40000}), "defect")
    edit(pair[1], max_position_embeddings=2048)
    assert "has 2048 positions, the server a context of 4096" in only(recipe(*pair), "defect")
    assert findings(recipe(*pair, engine={"context_length": 2048})) == []
    allowed = {"environment": {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}}
    assert findings(recipe(*pair, engine=allowed)) == []


@pytest.mark.parametrize(
    ("engine", "words"),
    [
        ({"pipeline_parallel": 2}, "pipeline_parallel is 2; drafters need 1"),
        ({"tensor_parallel": 4, "attention_data_parallel": 3}, "3 does not divide"),
        ({"tensor_parallel": 3}, "3 ranks do not divide the target's 4 attention heads"),
        ({"tensor_parallel": 8}, "8 ranks do not divide the drafter's 4 attention heads"),
        ({"tensor_parallel": 32}, "32 ranks do not divide the drafter's intermediate_size 48"),
    ],
)
def test_parallel(engine: dict[str, Any], words: str, pair: tuple[Path, Path]) -> None:
    found = findings(recipe(*pair, engine=engine))
    assert found and words in " ".join(each.what for each in found)
    assert {each.severity for each in found} == {"defect"}


def test_the_drafter_is_split_within_an_attention_group(pair: tuple[Path, Path]) -> None:
    """Eight ranks in two groups: four for its four heads."""
    engine = {"tensor_parallel": 8, "attention_data_parallel": 2}
    assert findings(recipe(*pair, engine=engine)) == []


BLOCK_WIDTHS: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 1280,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("changes", "ranks", "words"),
    [
        ({}, 1, ""),
        ({}, 2, ""),
        ({}, 4, "the key-value heads' width is 64, intermediate_size is 320"),
        ({"head_dim": 128}, 4, "intermediate_size is 320"),
        ({"head_dim": 128}, 8, "intermediate_size is 160"),
        ({"head_dim": 128, "intermediate_size": 1024}, 8, ""),
        ({"num_key_value_heads": 8}, 8, "the attention heads' width is 64, the key-value"),
    ],
)
def test_blocks_are_whole_on_each_rank(
    changes: dict[str, Any], ranks: int, words: str, tmp_path: Path
) -> None:
    """1280 is ten blocks of 128: five a rank of two, two and a half of four."""
    draft = drafter(tmp_path / "d", quantization=Quantization("block"), **BLOCK_WIDTHS | changes)
    asked = recipe("some/target", draft, engine={"tensor_parallel": ranks})
    if not words:
        assert findings(asked) == []
        return
    assert f"on each of {ranks} ranks of the drafter {words}" in only(asked, "defect")
    channel = drafter(tmp_path / "c", quantization=Quantization("channel"), **BLOCK_WIDTHS)
    assert findings(recipe("some/target", channel, engine={"tensor_parallel": ranks})) == []


def test_blocks_of_parts_that_are_not_quantized_may_be_split(tmp_path: Path) -> None:
    kept = Quantization("block", kept=("gate_up", "down"))
    draft = drafter(tmp_path / "d", quantization=kept, **{**BLOCK_WIDTHS, "head_dim": 128})
    assert findings(recipe("some/target", draft, engine={"tensor_parallel": 4})) == []


def test_key_value_heads_fit_either_way(pair: tuple[Path, Path], tmp_path: Path) -> None:
    wide = target(tmp_path / "wide", num_attention_heads=12)
    three = drafter(tmp_path / "three", num_attention_heads=12, num_key_value_heads=3)
    for ranks, fits in ((1, True), (3, True), (6, True), (2, False), (4, False)):
        found = findings(recipe(wide, three, engine={"tensor_parallel": ranks}))
        assert (found == []) is fits, (ranks, found)


@pytest.mark.parametrize(
    ("sections", "severity", "words"),
    [
        ({"draft": {"attention_backend": "flashmla"}}, "defect", "expected one of flashinfer"),
        ({"draft": {"attention_backend": "trtllm_mha"}}, "warning", "causal drafters only"),
        (
            {"draft": {"attention_backend": "fa4", "kv_cache_dtype": "fp8_e4m3"}},
            "warning",
            "fa4 reads a cache of the compute dtype only",
        ),
        ({"target": {"dtype": "float32"}}, "defect", "fails at the first request"),
        ({"engine": {"device": "cpu", "attention_backend": "fa3"}}, "defect", "only torch_native"),
        ({"engine": {"device": "cpu", "kv_cache_dtype": "fp8_e4m3"}}, "defect", "neither"),
    ],
)
def test_backends(
    sections: dict[str, Any], severity: str, words: str, pair: tuple[Path, Path]
) -> None:
    assert words in only(recipe(*pair, **sections), severity)


def test_float32_is_for_the_cpu(pair: tuple[Path, Path]) -> None:
    assert findings(recipe(*pair, target={"dtype": "float32"}, engine={"device": "cpu"})) == []


def test_an_acceptance_that_is_made_up_is_refused(pair: tuple[Path, Path]) -> None:
    made_up = {"environment": {"SGLANG_SIMULATE_ACC_LEN": "5"}}
    assert "SGLANG_SIMULATE_ACC_LEN" in only(recipe(*pair, engine=made_up), "defect")


def test_files_of_dspark_without_their_mode(pair: tuple[Path, Path], tmp_path: Path) -> None:
    draft = drafter(tmp_path / "dspark", dspark=True)
    asked: dict[str, Any] = {"algorithm": "dspark", "sts": "sts.json", "sps": "sps.json"}
    assert "draft.sts and draft.sps without effect" in only(
        recipe(pair[0], draft, draft=asked), "warning"
    )
    mode = {"environment": {"SGLANG_RAGGED_VERIFY_MODE": "cap-accept"}}
    assert findings(recipe(pair[0], draft, draft=asked, engine=mode)) == []
    assert "no effect with dflash" in only(recipe(*pair, engine=mode), "warning")


@pytest.mark.parametrize(
    ("arguments", "severity", "words"),
    [
        (["--tp", "4"], "defect", "the key engine.tensor_parallel writes it"),
        (["--speculative-dflash-block-size=8"], "defect", "draft.num_draft_tokens writes it"),
        (["--disaggregation-decode-enable-radix-cache"], "defect", "refuses a decode server"),
        (["--enable-return-hidden-states"], "defect", "capture from a server without a drafter"),
        (["--speculative-accept-threshold-acc", "0.9"], "defect", "no longer the target's"),
        (["--speculative-adaptive"], "warning", "no effect: for EAGLE only"),
        (["--speculative-num-steps", "3"], "warning", "the engine sets it to 1"),
        (["--page-size 64"], "defect", "as one word"),
        (["--api-key K"], "defect", "'--api-key ***' as one word"),
        (["--ssl-certfile", "c.pem"], "defect", "put TLS in front of it"),
        (["--speculative-accept-threshold-si", "0.1"], "defect", "no longer the target's"),
        (["--speculative_accept_threshold_single=0"], "defect", "no longer the target's"),
        (["--speculative-algo", "NGRAM"], "defect", "(that is --speculative-algorithm)"),
        (["--enable-return-hidden"], "defect", "capture from a server without a drafter"),
        (["--speculative-num-st", "3"], "warning", "(that is --speculative-num-steps)"),
        (["--config", "more.yaml"], "defect", "seen by none of our checks"),
        (["--conf=more.yaml"], "defect", "(that is --config)"),
        (["--"], "defect", "takes no words behind it"),
        (["page-size", "64"], "defect", "expected an option"),
    ],
)
def test_arguments(
    arguments: list[str], severity: str, words: str, pair: tuple[Path, Path]
) -> None:
    assert words in only(recipe(*pair, engine={"arguments": arguments}), severity)


def test_arguments_that_pass(pair: tuple[Path, Path], tmp_path: Path) -> None:
    free = ["--page-size", "64", "--log-level", "info"]
    assert findings(recipe(*pair, engine={"arguments": free})) == []
    draft = drafter(tmp_path / "dspark", dspark=True)
    decode = {"arguments": ["--disaggregation-decode-enable-radix-cache"]}
    dspark = {"algorithm": "dspark"}
    assert findings(recipe(pair[0], draft, draft=dspark, engine=decode)) == []
