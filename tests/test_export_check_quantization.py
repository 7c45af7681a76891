"""What spec check says of FP8 drafters whose config.json, weights and scales disagree."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_fp8 import UP, fp8
from torch import Tensor
from toy_drafter import edit

from spec.dflash.fp8 import E4M3, Quantization, left_out
from spec.export.check import Report, check


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def _unquantize(name: str) -> Callable[[dict[str, Tensor]], object]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors.pop(f"{name}.weight_scale")
        tensors[f"{name}.weight"] = tensors[f"{name}.weight"].to(torch.bfloat16)

    return change


def _set(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: value})


def _ignore(folder: Path, patterns: list[str]) -> None:
    data = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit(folder, quantization_config={**data, "ignore": patterns})


def _by_path(folder: Path) -> None:
    for layer in (0, 1):
        for each in "qkv":
            rewrite(folder, _unquantize(f"layers.{layer}.self_attn.{each}_proj"))
    _ignore(folder, [f"layers.{layer}.self_attn.{each}_proj" for layer in (0, 1) for each in "qkv"])


# (how it is broken, what the defect says, what its cure says)
BROKEN: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "q quantized, k not": (
        lambda d: rewrite(d, _unquantize("layers.0.self_attn.k_proj")),
        "of q_proj, k_proj, v_proj some are quantized and others not (layer 0)",
        "quantize all of them or none",
    ),
    "gate quantized, up not": (
        lambda d: rewrite(d, _unquantize(UP)),
        "of gate_proj, up_proj some are quantized",
        "spec quantize",
    ),
    "one layer of two": (
        lambda d: rewrite(d, _unquantize("layers.1.mlp.down_proj")),
        "down_proj is quantized in layer 0 only",
        "in all layers or in none",
    ),
    "no scale": (
        lambda d: rewrite(d, lambda t: t.pop(f"{UP}.weight_scale")),
        f"quantization_config without scales for {UP}.weight",
        "quantize it again",
    ),
    "scale of another shape": (
        lambda d: rewrite(d, _set(f"{UP}.weight_scale", torch.ones(1))),
        f"{UP}.weight_scale is F32 [1], expected F32 [256, 1]",
        "quantize it again",
    ),
    "scale of another type": (
        lambda d: rewrite(d, _set(f"{UP}.weight_scale", torch.ones(256, 1, dtype=torch.bfloat16))),
        f"{UP}.weight_scale is BF16 [256, 1], expected F32",
        "quantize it again",
    ),
    "scale of zeros": (
        lambda d: rewrite(d, _set(f"{UP}.weight_scale", torch.zeros(256, 1))),
        f"{UP}.weight_scale holds NaN, 0 or less",
        "quantize it again",
    ),
    "scale of NaN": (
        lambda d: rewrite(d, _set(f"{UP}.weight_scale", torch.full((256, 1), torch.nan))),
        f"{UP}.weight_scale holds NaN, 0 or less",
        "quantize it again",
    ),
    "scale of the other scheme": (
        lambda d: rewrite(
            d, lambda t: t.update({f"{UP}.weight_scale_inv": t.pop(f"{UP}.weight_scale")})
        ),
        f"{UP}.weight_scale is missing",
        "quantize it again",
    ),
    "a scale without FP8": (
        lambda d: rewrite(d, _set("fc.weight_scale", torch.ones(128, 1))),
        "scales of no FP8 weight: fc.weight_scale",
        "quantize it again",
    ),
    "no quantization_config": (
        lambda d: edit(d, quantization_config=None),
        "without quantization_config: the engine takes the numbers as they are",
        "write the quantization_config",
    ),
    "fc quantized": (
        lambda d: rewrite(
            d,
            lambda t: t.update(
                {"fc.weight": t["fc.weight"].to(E4M3), "fc.weight_scale": torch.ones(128, 1)}
            ),
        ),
        "fc.weight quantized: SGLang has no scale there",
        "store them in bfloat16",
    ),
    "left out by path": (
        _by_path,
        "layers.0.self_attn.q_proj, layers.0.self_attn.k_proj",
        "add to ignore: re:(.*\\.)?(q|k|v|qkv)_proj$",
    ),
    "left out though quantized": (
        lambda d: _ignore(d, ["o_proj"]),
        "ignore leaves out o_proj, whose weights are F8_E4M3",
        "take o_proj out of ignore",
    ),
    "not a pattern": (lambda d: _ignore(d, ["re:("]), "not a pattern", "correct"),
}


@pytest.mark.parametrize("how", BROKEN)
def test_check_names_the_defect(tmp_path: Path, how: str) -> None:
    change, what, cure = BROKEN[how]
    out = fp8(tmp_path)
    assert check(out).facts["quantization"].startswith("compressed-tensors: e4m3 by output row")
    assert "unquant" not in check(out).facts["engine_options"]
    change(out)
    report = check(out)
    assert any(what in f.what and cure in f.cure for f in _defects(report)), report.findings


def _defects(report: Report) -> list[Any]:
    return [finding for finding in report.findings if finding.severity == "defect"]


def test_check_knows_the_widths_of_blocks(tmp_path: Path) -> None:
    out = fp8(tmp_path, Quantization("block"))
    assert not check(out).has_defect
    edit(out, head_dim=48)
    assert any("the attention heads' width is 192" in f.what for f in _defects(check(out)))


def test_a_quantization_that_only_the_engine_reads_is_a_warning_for_spec(tmp_path: Path) -> None:
    out = fp8(tmp_path)
    edit(out, quantization_config={"quant_method": "fp8", "activation_scheme": "static"})
    told = [f for f in check(out).findings if "spec decodes" in f.what]
    assert [(f.severity, f.engine) for f in told] == [("warning", "spec")]
    assert not check(out).has_defect


def modelopt(folder: Path, *, keep: str = "", **config: Any) -> Path:
    """A drafter as ModelOpt stores it, one scale a weight; modules with `keep` in bfloat16."""
    out = fp8(folder)
    tensors = load_file(out / "model.safetensors")
    for name in [name for name in tensors if name.endswith("weight_scale")]:
        weight = name.removesuffix("_scale")
        tensors[name] = torch.ones(())
        tensors[name.replace("weight_scale", "input_scale")] = torch.ones(())
        if keep and keep in name:
            tensors[weight] = tensors[weight].to(torch.bfloat16)
            del tensors[name], tensors[name.replace("weight_scale", "input_scale")]
    save_file(tensors, out / "model.safetensors")
    edit(out, quantization_config={"quant_method": "modelopt", "quant_algo": "FP8", **config})
    return out


def _told(folder: Path) -> list[tuple[str, str]]:
    return [(f.severity, f.engine) for f in check(folder).findings]


@pytest.mark.parametrize(
    ("names", "good"),
    [
        (["lm_head", "layers.0.self_attn*", "layers.1.self_attn*"], False),
        (["q_proj", "k_proj", "v_proj", "o_proj"], True),
        (["*qkv*", "o_proj"], True),
    ],
)
def test_modelopts_names_are_read_as_the_engine_reads_them(
    tmp_path: Path, names: list[str], good: bool
) -> None:
    out = modelopt(tmp_path, keep="self_attn", ignore=names)
    told = [f.what for f in _defects(check(out))]
    assert (told == []) is good, told
    if not good:
        assert (
            len(told) == 2 and "layers.0.self_attn*, layers.1.self_attn* match nothing" in told[0]
        )
    assert check(out).facts["quantization"] == "modelopt FP8"
    edit(out, quantization_config={"quant_method": "other", "ignore": ["layers.0.self_attn*"]})
    assert _told(out) == [("warning", "spec"), ("warning", "SGLang")]


def test_modelopts_own_file_beside_the_config(tmp_path: Path) -> None:
    out = modelopt(tmp_path)
    edit(out, quantization_config=None)
    assert any("without quantization_config" in f.what for f in _defects(check(out)))
    own = {"producer": {}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (out / "hf_quant_config.json").write_text(json.dumps(own))
    (told,) = check(out).findings
    assert told.engine == "spec" and told.what.startswith("hf_quant_config.json modelopt FP8 is")
    (out / "hf_quant_config.json").write_text("[")
    assert any("is 'not JSON'" in f.what for f in _defects(check(out)))


def test_compression_config_is_the_engines_other_name(tmp_path: Path) -> None:
    out = fp8(tmp_path)
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    edit(out, quantization_config=None, compression_config=config)
    assert _told(out) == [("warning", "spec")]
    rewrite(out, lambda t: t.pop(f"{UP}.weight_scale"))
    assert "compression_config without scales" in _defects(check(out))[0].what


def _four_bits(folder: Path, divisor: int = 2) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            rows, columns = tensors[name].shape
            tensors[name] = torch.zeros(rows, columns // divisor, dtype=torch.uint8)

    rewrite(folder, change)


def test_two_fp4_weights_a_byte(tmp_path: Path) -> None:
    out = modelopt(tmp_path, quant_algo="NVFP4")
    _four_bits(out)
    assert _told(out) == [("warning", "spec")]
    assert check(out).facts["quantized"] == "fp4"
    _four_bits(out)
    assert any("shapes differ" in f.what for f in _defects(check(out)))


def test_a_packing_that_nobody_understands_is_not_judged(tmp_path: Path) -> None:
    out = modelopt(tmp_path)

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if n.endswith("_proj.weight")]:
            del tensors[name], tensors[f"{name}_scale"]
            tensors.pop(name.replace("weight", "input_scale"), None)
            tensors[name.replace("weight", "qweight")] = torch.zeros(4, 9, dtype=torch.int32)
            tensors[name.replace("weight", "scales")] = torch.zeros(4, 9, dtype=torch.float16)

    rewrite(out, change)
    edit(out, quantization_config={"quant_method": "gptq", "bits": 4})
    (told,) = check(out).findings
    assert (told.severity, told.engine) == ("warning", "spec")
    assert "gptq is not one that spec decodes" in told.what and "nor is" in told.what
    assert "unquant" not in check(out).facts["engine_options"]
    rewrite(out, lambda t: t.pop("layers.0.self_attn.q_norm.weight"))
    assert any("missing: layers.0.self_attn.q_norm" in f.what for f in _defects(check(out)))


def test_blocks_bound_the_ranks(tmp_path: Path) -> None:
    out = fp8(tmp_path, Quantization("block"))
    assert check(out).facts["tensor_parallel"] == [1]
    edit(out, num_attention_heads=8, num_key_value_heads=4, intermediate_size=512)
    assert check(out).facts["tensor_parallel"] == [1, 2]


def test_of_two_keys_the_one_that_the_engine_reads_is_named(tmp_path: Path) -> None:
    config = {"ignored_layers": [], "modules_to_not_convert": ["fc"]}
    assert left_out(config, "block") == ("modules_to_not_convert", ["fc"])
    out = fp8(tmp_path, Quantization("block"))
    data = json.loads((out / "config.json").read_text())["quantization_config"]
    edit(out, quantization_config={**data, "ignored_layers": ["o_proj"]})
    (told,) = _defects(check(out))
    assert "ignored_layers leaves out o_proj, whose weights are F8_E4M3" in told.what
    assert told.cure == "take o_proj out of ignored_layers"
