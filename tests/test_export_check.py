"""spec check: each way in which a directory is broken is named, of a good one nothing is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_layouts import edit
from torch import Tensor
from toy_drafter import dflash_config, dspark_config, saved

from spec.dflash.draft import DFlashDraft
from spec.dspark.draft import DSparkDraft
from spec.export.check import check
from spec.export.checkpoint import write
from spec.export.findings import Engine
from spec.export.layouts import LAYOUTS, LayoutName

Tensors = dict[str, Tensor]
Q_NORM = "layers.0.self_attn.q_norm.weight"
HEADS = ("markov_head.", "confidence_head.")


def make(folder: Path, kind: str = "dflash") -> Path:
    return saved(folder, dflash_config() if kind == "dflash" else dspark_config())


def rewrite(folder: Path, change: Callable[[Tensors], Tensors]) -> None:
    path = folder / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(path)).items()}, path)


def nested(folder: Path, **changes: Any) -> None:
    own = json.loads((folder / "config.json").read_text())["dflash_config"]
    edit(folder, dflash_config={k: v for k, v in {**own, **changes}.items() if v is not None})


def without(name: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def renamed(prefix: str, other: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {
        (other + k.removeprefix(prefix) if k.startswith(prefix) else k): v
        for k, v in tensors.items()
    }


def with_nan(tensors: Tensors) -> Tensors:
    tensors["layers.1.mlp.up_proj.weight"][3, 5] = torch.nan
    return tensors


def second_layer_doubled(tensors: Tensors) -> Tensors:
    third = {k.replace("layers.1.", "layers.2."): v.clone() for k, v in tensors.items()}
    return {**third, **tensors}


def nest_heads(folder: Path) -> None:
    data = json.loads((folder / "config.json").read_text())
    keys = ("markov_rank", "markov_head_type")
    edit(folder, dflash_config={k: data[k] for k in keys}, **dict.fromkeys(keys))


def label_as_dflash(folder: Path) -> None:
    edit(folder, architectures=["DFlashDraftModel"])


def drop_head_keys(folder: Path) -> None:
    keys = ("markov_rank", "markov_head_type", "enable_confidence_head")
    label_as_dflash(folder)
    edit(folder, confidence_head_with_markov=None, **dict.fromkeys(keys))


def as_fp8(tensors: Tensors) -> Tensors:
    name = "layers.0.mlp.up_proj.weight"
    return {**tensors, name: tensors[name].to(torch.float8_e4m3fn)}


SLIDING: dict[str, Any] = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 64}
FP8: dict[str, Any] = {"quantization_config": {"quant_method": "fp8"}}
TARGETS = {"embed_tokens.weight": torch.zeros(64, 32)}
ROPE = {"rope_type": "default", "rope_theta": 50000.0}

# (drafter, how it is broken, what the defect says, what its cure says)
BROKEN: dict[str, tuple[str, Callable[[Path], object], str, str]] = {
    "q_norm missing": (
        "dflash",
        lambda d: rewrite(d, without(Q_NORM)),
        f"missing: {Q_NORM}; engines start without an error",
        "save the drafter again",
    ),
    "a layer more in the config": (
        "dflash",
        lambda d: edit(d, num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "config.json says 3 draft layers, the file holds 2",
        "write num_hidden_layers 2",
    ),
    "a layer more in the file": (
        "dflash",
        lambda d: rewrite(d, second_layer_doubled),
        "config.json says 2 draft layers, the file holds 3; the difference is ignored",
        "write num_hidden_layers 3",
    ),
    "heads elsewhere": (
        "dspark",
        lambda d: rewrite(d, renamed("markov_head.", "dspark.markov.")),
        "dspark.markov.markov_w2.weight, expected markov_head.markov_w1.weight",
        "rename them",
    ),
    "no head tensors": (
        "dspark",
        lambda d: rewrite(d, without("confidence_head.proj.bias")),
        "missing: confidence_head.proj.bias",
        "correct the config's heads",
    ),
    "a head too many": (
        "dspark",
        lambda d: edit(d, enable_confidence_head=False, confidence_head_with_markov=False),
        "belong to a head that config.json does not have",
        "enable_confidence_head",
    ),
    "gated with vanilla weights": (
        "dspark",
        lambda d: edit(d, markov_head_type="gated"),
        "markov_head_type is gated, the head's weights are those of vanilla",
        "write markov_head_type vanilla",
    ),
    "unknown head": (
        "dspark",
        lambda d: edit(d, markov_head_type="lstm"),
        "markov_head_type is 'lstm'",
        "vanilla, gated, rnn",
    ),
    "descending layer ids": (
        "dflash",
        lambda d: nested(d, target_layer_ids=[3, 1]),
        "target_layer_ids [3, 1] do not rise strictly",
        "write them ascending",
    ),
    "the last layer": (
        "dflash",
        lambda d: nested(d, target_layer_ids=[1, 5]),
        "target_layer_ids [1, 5] name the last layer",
        "train with layers 0 to 4",
    ),
    "a layer beyond": (
        "dflash",
        lambda d: nested(d, target_layer_ids=[1, 6]),
        "name a layer beyond the 6 there",
        "train with layers 0 to 4",
    ),
    "the embedding": (
        "dspark",
        lambda d: edit(d, target_layer_ids=[-1, 3]),
        "name the embedding's output",
        "decoder layers only",
    ),
    "no layer ids": (
        "dflash",
        lambda d: nested(d, target_layer_ids=None),
        "no target_layer_ids",
        "--layer-ids",
    ),
    "DSpark labelled DFlash": (
        "dspark",
        label_as_dflash,
        "a DSpark drafter labelled ['DFlashDraftModel']: it has the keys markov_rank",
        "Qwen3DSparkModel",
    ),
    "DSpark's heads in a DFlash directory": (
        "dspark",
        drop_head_keys,
        "a DSpark drafter labelled ['DFlashDraftModel']: it has 4 tensors of its heads",
        "Qwen3DSparkModel",
    ),
    "no block_size": (
        "dflash",
        lambda d: (edit(d, block_size=None), nested(d, block_size=None)),
        "no block_size: SGLang and z-lab take 16",
        "--block-size",
    ),
    "a block of one": (
        "dflash",
        lambda d: (edit(d, block_size=1), nested(d, block_size=1)),
        "block_size is 1, expected a whole number of 2 or more",
        "trained with",
    ),
    "Markov keys nested": (
        "dspark",
        nest_heads,
        "markov_rank, markov_head_type only inside dflash_config",
        "move them to the top level",
    ),
    "rank 0": (
        "dspark",
        lambda d: edit(d, markov_rank=0, confidence_head_with_markov=False),
        "markov_rank is 0: SGLang's DSPARK refuses it",
        "draft.markov_rank above 0",
    ),
    "another dtype": (
        "dflash",
        lambda d: edit(d, dtype="bfloat16"),
        "config.json says dtype bfloat16, the weights are F32",
        "write what the file holds",
    ),
    "mixed dtypes": (
        "dflash",
        lambda d: rewrite(d, lambda t: {**t, Q_NORM: t[Q_NORM].half()}),
        "config.json says dtype float32, the weights are F16, F32",
        "write what the file holds",
    ),
    "sliding without is_causal": (
        "dflash",
        lambda d: edit(d, is_causal=None, **SLIDING),
        "sliding_attention without is_causal",
        "is_causal: false",
    ),
    "sliding without a window": (
        "dflash",
        lambda d: edit(d, layer_types=["sliding_attention"] * 2),
        "sliding_attention without sliding_window",
        "the window",
    ),
    "fc transposed": (
        "dflash",
        lambda d: rewrite(d, lambda t: {**t, "fc.weight": t["fc.weight"].T}),
        "fc.weight is transposed: [64, 32], expected [32, 64]",
        "store its transpose",
    ),
    "fc of other layers": (
        "dflash",
        lambda d: nested(d, target_layer_ids=[1, 2, 3]),
        "fc.weight is [32, 64], expected [32, 96]: hidden size by 3 layers'",
        "target_layer_ids",
    ),
    "another shape": (
        "dflash",
        lambda d: edit(d, intermediate_size=40),
        "layers.0.mlp.gate_proj.weight is [48, 32], expected [40, 32]",
        "correct the sizes",
    ),
    "mask beyond the vocabulary": (
        "dflash",
        lambda d: nested(d, mask_token_id=64),
        "mask_token_id is 64, no row of the vocabulary of 64",
        "spec inspect TARGET",
    ),
    "no mask": ("dflash", lambda d: nested(d, mask_token_id=None), "no mask_token_id", "--mask"),
    "NaN": (
        "dflash",
        lambda d: rewrite(d, with_nan),
        "NaN or infinity in layers.1.mlp.up_proj.weight",
        "copy the file again",
    ),
    "local paths": (
        "dflash",
        lambda d: edit(d, _name_or_path="/home/me/model", base={"of": ["~/x"]}),
        "paths of another machine in config.json: _name_or_path, base.of.0",
        "remove these keys",
    ),
    "the target's tensors": (
        "dspark",
        lambda d: rewrite(d, lambda t: {**t, **TARGETS}),
        "tensors of the target in the file: embed_tokens.weight",
        "remove them",
    ),
    "quantized without scales": (
        "dflash",
        lambda d: edit(d, **FP8),
        "quantization_config without scales: all weights are F32",
        "quantize it again",
    ),
    "one scale missing": (
        "dflash",
        lambda d: (rewrite(d, as_fp8), edit(d, **FP8)),
        "quantization_config without scales for layers.0.mlp.up_proj.weight",
        "quantize it again",
    ),
    "quantized without a word": (
        "dflash",
        lambda d: rewrite(d, as_fp8),
        "quantized weights (layers.0.mlp.up_proj.weight) without quantization_config",
        "write the quantization_config",
    ),
    "RoPE twice": (
        "dflash",
        lambda d: edit(d, rope_theta=1.0),
        "rope_theta is 1.0 but rope_parameters says 50000.0",
        "rope_parameters",
    ),
    "no RoPE": (
        "dflash",
        lambda d: edit(d, rope_theta=None, rope_parameters=None),
        "states no RoPE",
        "rope_parameters",
    ),
    "partial RoPE": (
        "dflash",
        lambda d: edit(d, partial_rotary_factor=0.25),
        "partial_rotary_factor is 0.25",
        "the whole head",
    ),
    "an unknown tensor": (
        "dflash",
        lambda d: rewrite(d, lambda t: {**t, "layers.0.gate.weight": torch.zeros(2)}),
        "unexpected: layers.0.gate.weight",
        "rename what is misnamed",
    ),
    "layer types of another depth": (
        "dflash",
        lambda d: edit(d, layer_types=["full_attention"]),
        "layer_types is ['full_attention'], expected a list of 2",
        "once a layer",
    ),
    "anything else that spec refuses": (
        "dflash",
        lambda d: edit(d, num_key_value_heads="2"),
        "num_key_value_heads is '2', expected a positive whole number",
        "correct config.json",
    ),
    "temperatures of another block": (
        "dspark",
        lambda d: (d / "sts.json").write_text('{"temperatures": [1.0, 1.0]}'),
        "sts.json has 2 temperatures, the drafter drafts 4 tokens",
        "spec calibrate",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_every_defect_is_named_with_its_cure(tmp_path: Path, case: str) -> None:
    kind, break_it, what, cure = BROKEN[case]
    folder = make(tmp_path / "draft", kind)
    assert not check(folder).findings
    break_it(folder)
    report = check(folder)
    named = [f for f in report.findings if f.severity == "defect" and what in f.what]
    assert len(named) == 1, report.findings
    assert cure in named[0].cure
    assert report.has_defect


@pytest.mark.parametrize(
    "case",
    [
        *("q_norm missing", "a layer more in the config", "heads elsewhere", "NaN"),
        *("gated with vanilla weights", "fc transposed", "DSpark's heads in a DFlash directory"),
        *("no block_size", "another dtype", "Markov keys nested", "mask beyond the vocabulary"),
    ],
)
def test_one_mistake_is_told_once(tmp_path: Path, case: str) -> None:
    kind, break_it, *_ = BROKEN[case]
    folder = make(tmp_path / "draft", kind)
    break_it(folder)
    assert len(check(folder).findings) == 1


def test_speculators_numbering_is_no_sglang_directory(tmp_path: Path) -> None:
    config, weights = dflash_config(), DFlashDraft(dflash_config()).state_dict()
    write(config, weights, tmp_path / "vllm", LAYOUTS["vllm"], target_name="toy")
    (defect,) = check(tmp_path / "vllm").findings
    assert "aux_hidden_state_layer_ids [2, 4] count the embedding as 0" in defect.what
    assert (defect.engine, defect.severity) == ("SGLang", "defect")
    assert defect.cure.endswith("turns [2, 4] into [1, 3]")
    assert check(tmp_path / "vllm").facts["target_layer_ids"] == [1, 3]
    assert not check(tmp_path / "vllm", engine="vllm").findings


def speculators(folder: Path, **changes: Any) -> Path:
    config, weights = dflash_config(), DFlashDraft(dflash_config()).state_dict()
    write(config, weights, folder, LAYOUTS["vllm"], target_name="toy")
    edit(folder, **changes)
    return folder


def test_a_speculators_config_without_a_backbone(tmp_path: Path) -> None:
    folder = speculators(tmp_path / "vllm", transformer_layer_config=[1])
    (finding,) = check(folder, engine="vllm").findings
    assert "transformer_layer_config is [1]" in finding.what


ENGINES: list[tuple[str, LayoutName, Engine, bool]] = [
    ("dflash", "sglang", "zlab", False),
    ("dflash", "zlab", "sglang", False),
    ("dspark", "sglang", "zlab", True),
    ("dspark", "deepspec", "sglang", False),
    ("dspark", "deepspec", "deepspec", False),
    ("dspark", "sglang", "deepspec", True),
    ("dflash", "vllm", "zlab", True),
]


@pytest.mark.parametrize(("kind", "layout", "engine", "wrong"), ENGINES)
def test_who_reads_which_layout(
    tmp_path: Path, kind: str, layout: LayoutName, engine: Engine, wrong: bool
) -> None:
    draft = DFlashDraft(dflash_config()) if kind == "dflash" else DSparkDraft(dspark_config())
    both = {"embed_tokens.weight": torch.zeros(64, 32), "lm_head.weight": torch.zeros(64, 32)}
    carried = both if LAYOUTS[layout].carries_target else None
    out = tmp_path / "out"
    write(draft.config, draft.state_dict(), out, LAYOUTS[layout], target_name="t", carried=carried)
    report = check(out, engine=engine)
    assert report.has_defect is wrong, report.findings
    assert report.facts["layout"].startswith(layout)


def test_facts_of_both_algorithms(tmp_path: Path) -> None:
    dflash = check(make(tmp_path / "a")).facts
    dspark = check(make(tmp_path / "b", "dspark")).facts
    assert (dflash["block_size"], dflash["num_draft_tokens"], dspark["num_draft_tokens"]) == (
        4,
        3,
        4,
    )
    assert "--speculative-num-draft-tokens 4 " in dflash["engine_options"]
    assert "--speculative-num-draft-tokens 5 " in dspark["engine_options"]
    assert dflash["heads"] is None and dspark["heads"]["markov_rank"] == 8
    assert dflash["attention"] == "full_attention, bidirectional in the block"
    assert (dflash["rope"], dflash["mask_token_id"]) == (ROPE, 63)
    parameters = sum(p.numel() for p in DFlashDraft(dflash_config()).parameters())
    assert (dflash["parameters"], dflash["stored_bytes"]) == (parameters, {"F32": 4 * parameters})


def test_scale_and_missing_words_are_no_defects(tmp_path: Path) -> None:
    folder = make(tmp_path / "draft")
    edit(folder, is_causal=None, num_target_layers=None, dtype=None)
    nested(folder, input_embedding_scale=8.0)
    report = check(folder)
    assert not report.has_defect
    said = " ".join(finding.what for finding in report.findings)
    for words in ("input_embedding_scale is 8.0", "num_target_layers is None", "no dtype"):
        assert words in said
    assert [finding.severity for finding in report.findings] == ["warning"] * 3 + ["note"]


def test_directories_that_nothing_can_be_said_of(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no config.json"):
        check(tmp_path)
    folder = make(tmp_path / "draft")
    (folder / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match="expected a weight_map"):
        check(folder)
    (folder / "model.safetensors.index.json").unlink()
    whole = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(whole[:-100])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        check(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no drafter weights"):
        check(folder)
    (folder / "config.json").write_text("[")
    with pytest.raises(ValueError, match="not JSON"):
        check(folder)


def test_heads_behind_model_are_found_by_the_engine_and_warned_of(tmp_path: Path) -> None:
    folder = make(tmp_path / "d", "dspark")
    rewrite(folder, renamed("markov_head.", "model.markov_head."))
    (found,) = check(folder).findings
    assert found.severity == "warning" and "model.markov_head.markov_w1.weight" in found.what
    assert "spec import DIR --out OUT" in found.cure
