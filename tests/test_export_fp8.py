"""FP8 drafters: what is written, how large, and the gate."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from toy_drafter import dflash_config, dspark_config, saved

from spec.data.prompts import Prompt
from spec.dflash.config import DFlashConfig
from spec.dflash.fp8 import E4M3, Part, Quantization, Scheme
from spec.eval.decode import Decoded
from spec.export.check import check
from spec.export.checkpoint import Checkpoint, read
from spec.export.convert import export_draft, import_draft
from spec.export.fp8 import (
    AcceptanceLostError,
    Gate,
    MeasureOptions,
    check_drop,
    quantize_draft,
    quantize_tensors,
    sizes,
)
from spec.export.fp8_acceptance import relative_change
from spec.export.layouts import LAYOUTS, expected_shapes
from spec.recipes.algorithms import load_draft
from spec.recipes.schema import DraftSection
from spec.target.model import Target
from spec.target.tiny import make_tiny_target
from spec.train.drafter import make_draft

WIDE: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
CHANNEL = Quantization("channel")
UP = "layers.0.mlp.up_proj"
Q = "layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(make_tiny_target(tmp_path_factory.mktemp("fp8") / "target", steps=2))


def fp8(folder: Path, quantization: Quantization = CHANNEL, **config: Any) -> Path:
    """An FP8 drafter, unmeasured."""
    source = saved(folder / "source", dflash_config(**{**WIDE, **config}))
    out = folder / "fp8"
    quantize_draft(source, out, quantization, name="source", gate=None)
    return out


@pytest.mark.parametrize("scheme", ["channel", "block"])
@pytest.mark.parametrize("config", [dflash_config(**WIDE), dspark_config(**WIDE)])
def test_what_is_written(tmp_path: Path, scheme: Scheme, config: DFlashConfig) -> None:
    source = saved(tmp_path / "a", config)
    (source / "spec.json").write_text(json.dumps({"target": {"name": "t", "revision": "r"}}))
    (source / "sps.json").write_text("{}")
    (source / "sts.json").write_text("{}")
    with pytest.warns(UserWarning, match="run spec calibrate on the new drafter"):
        quantize_draft(source, tmp_path / "b", Quantization(scheme), name="a", gate=None)
    stored = load_file(tmp_path / "b" / "model.safetensors")
    projections = {n for n in stored if "layers." in n and n.endswith("_proj.weight")}
    assert {stored[n].dtype for n in projections} == {E4M3}
    scales = {n for n in stored if "scale" in n}
    suffix = {"channel": "_scale", "block": "_scale_inv"}[scheme]
    assert scales == {n + suffix for n in projections}
    assert {stored[n].dtype for n in scales} == {torch.float32}
    rest = stored.keys() - projections - scales
    assert {stored[n].dtype for n in rest} == {torch.bfloat16}
    assert any("markov_head" in n for n in rest) == isinstance(config, type(dspark_config()))
    data = json.loads((tmp_path / "b" / "config.json").read_text())
    assert data["dtype"] == "bfloat16" and "quantization_config" in data
    said = json.loads((tmp_path / "b" / "spec.json").read_text())
    assert said["target"] == {"name": "t", "revision": "r"}
    assert said["quantization"]["from"] == "a" and said["quantization"]["measured"] is False
    assert (tmp_path / "b" / "sps.json").exists() and not (tmp_path / "b" / "sts.json").exists()
    told = check(tmp_path / "b")
    assert not told.has_defect and told.facts["quantized"] == "fp8"
    assert told.facts["parameters"] == check(source).facts["parameters"]  # scales are none


def realistic(**changes: Any) -> DFlashConfig:
    """Shapes of a published drafter: 5 layers for a target of 4 B parameters."""
    shape: dict[str, Any] = {
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "mask_token_id": 151669,
        "num_target_layers": 36,
        "target_layer_ids": (1, 9, 17, 25, 33),
    }
    if "markov_rank" in changes:
        return dspark_config(**shape, **changes)
    return dflash_config(**shape, **changes)


@pytest.mark.parametrize("scheme", ["channel", "block"])
@pytest.mark.parametrize(
    ("changes", "limit"), [({}, 0.54), ({"markov_rank": 64}, 0.56), ({"markov_rank": 256}, 0.60)]
)
def test_size_at_realistic_shapes(scheme: Scheme, changes: dict[str, Any], limit: float) -> None:
    """From shapes alone. A Markov head of rank 256 is an eighth of the file and stays bfloat16."""
    config = realistic(**changes)
    tensors = {n: torch.empty(s, device="meta") for n, s in expected_shapes(config).items()}
    found = Checkpoint(LAYOUTS["sglang"], config, tensors, {})
    quantized = realistic(**changes, quantization=Quantization(scheme))
    types = {
        n: torch.empty(s, device="meta", dtype=_dtype(n))
        for n, s in expected_shapes(quantized).items()
    }
    assert 0.5 < sizes(found, types)["size_ratio"] < limit


def _dtype(name: str) -> torch.dtype:
    if "scale" in name:
        return torch.float32
    return E4M3 if name.startswith("layers.") and "_proj" in name else torch.bfloat16


@pytest.mark.parametrize("kept", [("qkv",), ("gate_up", "down")])
def test_what_is_kept_stays_bfloat16(tmp_path: Path, kept: tuple[Part, ...]) -> None:
    out = fp8(tmp_path, Quantization("channel", kept))
    stored = load_file(out / "model.safetensors")
    is_kept = {"qkv": "qkv" in kept, "up": "gate_up" in kept}
    assert (stored[f"{Q}.weight"].dtype == torch.bfloat16) == is_kept["qkv"]
    assert (stored[f"{UP}.weight"].dtype == torch.bfloat16) == is_kept["up"]
    assert not check(out).has_defect
    load_draft(out)


def test_refusals(tmp_path: Path, target: Target) -> None:
    out = fp8(tmp_path)
    with pytest.raises(ValueError, match="FP8 already"):
        quantize_draft(out, tmp_path / "c", CHANNEL, name="b", gate=None)
    narrow = saved(tmp_path / "narrow", dflash_config())
    with pytest.raises(ValueError, match="use the scheme channel"):
        quantize_draft(narrow, tmp_path / "d", Quantization("block"), name="n", gate=None)
    found = read(narrow)
    found.tensors[f"{UP}.weight"][0, 0] = torch.nan
    with pytest.raises(ValueError, match=r"up_proj.weight: .*NaN or infinity"):
        quantize_tensors(found, CHANNEL)
    assert not (tmp_path / "c").exists() and not (tmp_path / "d").exists()
    with pytest.raises(ValueError, match="e4m3 weights do not train"):
        section = DraftSection.model_validate({"init_from": str(out)})
        make_draft(section, target, 0)


def test_export_and_import(tmp_path: Path) -> None:
    """To SGLang bit for bit; to those that cannot say it, not at all."""
    out = fp8(tmp_path)
    (out / "report.json").write_text("{}")  # its weights stay as they were measured
    export_draft(out, tmp_path / "again", "sglang")
    import_draft(out, tmp_path / "imported")
    assert all((tmp_path / each / "report.json").is_file() for each in ("again", "imported"))
    first, *others = (
        load_file(folder / "model.safetensors")
        for folder in (out, tmp_path / "again", tmp_path / "imported")
    )
    for other in others:
        assert first.keys() == other.keys()
        assert all(
            torch.equal(first[n].view(torch.uint8), other[n].view(torch.uint8)) for n in first
        )
    for layout in ("zlab", "vllm"):
        with pytest.raises(ValueError, match="its weights are FP8"):
            export_draft(out, tmp_path / layout, layout)


def test_relative_change_is_of_sums_and_paired() -> None:
    def answer(*num_accepted: int) -> Decoded:
        counts = list(num_accepted)
        return Decoded([], "length", counts, [7] * len(counts), 0.0, [])

    before = [answer(4, 4), answer(0, 0)]
    # 4 rounds, 8 accepted: 3. After: 4 rounds, 6 accepted: 2.5.
    change, (low, high) = relative_change(before, [answer(3, 3), answer(0, 0)])
    assert change == pytest.approx(2.5 / 3 - 1)
    assert low == pytest.approx(4 / 5 - 1) and high == 0.0
    # Requests differ widely, and both drafters agree on each: no interval at all.
    assert relative_change(before, before) == (0.0, (0.0, 0.0))
    rng = np.random.default_rng(0)
    noisy = [answer(*rng.integers(0, 7, 5).tolist()) for _ in range(40)]
    fewer = [answer(*(max(0, n - int(rng.integers(2))) for n in d.num_accepted)) for d in noisy]
    (_, paired), (_, shuffled) = (
        relative_change(noisy, after) for after in (fewer, [fewer[i] for i in rng.permutation(40)])
    )
    assert paired[1] - paired[0] < (shuffled[1] - shuffled[0]) / 2


def test_a_drop_is_a_failure_above_the_limit_only() -> None:
    summary = {
        "acceptance_length_before": 4.0,
        "acceptance_length_after": 3.96,
        "relative_change": -0.01,
        "relative_change_ci95": [-0.01, 0.0],
        "num_requests": 20,
        "num_rounds_after": 100,
        "max_drop": 0.01,
    }
    check_drop(summary)
    with pytest.raises(AcceptanceLostError, match=r"fell by 1.10% from 4.000 to 3.956"):
        check_drop({**summary, "relative_change": -0.011, "acceptance_length_after": 3.956})
    for changes, said in (
        ({"num_requests": 19}, "19 requests with 100 rounds are too few to tell"),
        ({"num_rounds_after": 99}, "20 requests with 99 rounds are too few to tell"),
        ({"relative_change_ci95": [-0.02, 0.0]}, r"reaches -2.00%, beyond the 1.00%"),
        ({"acceptance_length_before": 1.09}, r"next to nothing as it is .*1\.090"),
    ):
        with pytest.warns(UserWarning, match=said) as told:
            check_drop({**summary, **changes})
        assert len(told) == 1
    with pytest.raises(ValueError, match="measured on 1 request"):
        check_drop({**summary, "num_requests": 1})


@pytest.fixture(scope="module")
def target_draft(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drafter that accepts next to nothing, of the target's shape."""
    section = DraftSection.model_validate({"num_layers": 1, "block_size": 4, "num_features": 2})
    folder = tmp_path_factory.mktemp("draft") / "draft"
    make_draft(section, target, 0).save(folder)
    return folder


def gate(target: Target, max_drop: float) -> Gate:
    prompts = [
        Prompt(id=word, messages=[{"role": "user", "content": f"write {word}"}], tag="words")
        for word in "abc"
    ]
    return Gate(target, prompts, MeasureOptions(12, 4), max_drop)


def test_the_measurement_is_written(target: Target, target_draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    asked = gate(target, 1.0)
    summary = quantize_draft(target_draft, out, CHANNEL, name="before", gate=asked)
    report = json.loads((out / "report.json").read_text())
    assert (report["draft"], report["comparisons"][0]["draft"]) == ("out", "before")
    own = report["groups"]["all"]
    assert own["acceptance_length"] == summary["acceptance_length_after"]
    assert own["equal_to_plain"] == 1.0
    before = report["comparisons"][0]["groups"]["all"]["acceptance_length"]
    assert summary["relative_change"] == pytest.approx(own["acceptance_length"] / before - 1)
    said = json.loads((out / "spec.json").read_text())["quantization"]
    assert said["measured"] and said["acceptance_length_before"] == before
    assert str(tmp_path) not in json.dumps([report, said])


def test_a_drop_leaves_nothing_behind(target: Target, target_draft: Path, tmp_path: Path) -> None:
    # Less than no loss at all is allowed: any drafter fails.
    asked = gate(target, -2.0)
    with pytest.raises(AcceptanceLostError, match="nothing was written"):
        quantize_draft(target_draft, tmp_path / "out", CHANNEL, name="d", gate=asked)
    assert list(tmp_path.iterdir()) == []
