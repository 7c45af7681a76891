"""spec check and the loader on odd values in the files: findings or one line, never a crash."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_fp8 import UP, fp8
from toy_drafter import drafter, dspark_config, edit

from spec.dspark.draft import DSparkDraft
from spec.export.check import check
from spec.export.checkpoint import read
from spec.target.tiny import make_tiny_target

ODD: list[Any] = [
    *("x", "", 0, -1, 1.5, math.nan, True, 10**6, 10**30),
    *([], [1], ["a"], [None], [[1]], {}, {"a": 1}),
]


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    DSparkDraft(dspark_config(markov_head_type="gated")).save(tmp_path / "draft")
    return tmp_path / "draft"


def examine(folder: Path) -> None:
    """Both readers, of which only a user's errors may come."""
    for look in (check, read):
        try:
            look(folder)
        except (ValueError, FileNotFoundError) as error:
            assert len(str(error)) < 2000


@pytest.mark.slow
def test_odd_values_are_told_in_words(draft: Path) -> None:
    path = draft / "config.json"
    config = json.loads(path.read_text())
    keys = [(key,) for key in config]
    keys += [(key, inner) for key in ("rope_parameters",) for inner in config[key]]
    for key in keys:
        for value in ODD:
            changed = copy.deepcopy(config)
            (changed if len(key) == 1 else changed[key[0]])[key[-1]] = value
            path.write_text(json.dumps(changed))
            examine(draft)


@pytest.mark.slow
def test_odd_words_about_quantization(tmp_path: Path) -> None:
    folder = fp8(tmp_path)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    for key in config:
        for value in ODD:
            edit(folder, quantization_config={**config, key: value})
            examine(folder)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architectures": [[1]]}, "architectures is [[1]]"),
        ({"hidden_size": 0}, "hidden_size is 0, expected a positive whole number"),
        ({"hidden_size": 10**30}, "hidden_size is 1000000000000000000000000000000, expected at"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, expected at most 1000"),
        ({"is_causal": []}, "is_causal is [], expected true or false"),
        ({"rope_parameters": ""}, "rope_parameters is '', expected an object"),
    ],
)
def test_what_is_said_of_them(draft: Path, changes: dict[str, Any], said: str) -> None:
    edit(draft, **changes)
    with pytest.raises(ValueError, match="config.json") as refused:
        read(draft)
    assert said in str(refused.value)
    if "architectures" not in changes:
        report = check(draft)
        assert report.has_defect


def test_a_negative_mask_beside_a_target(tmp_path: Path) -> None:
    target = make_tiny_target(tmp_path / "target", steps=1)
    folder = drafter(target, tmp_path / "draft", confidence=False)
    edit(folder, mask_token_id=-1)
    assert check(folder, target=str(target)).has_defect


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100 + "1" + "}" * 100])
def test_a_deep_config_is_one_line(draft: Path, text: str) -> None:
    (draft / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: (not JSON|nested more than)"):
        check(draft)


@pytest.mark.parametrize("elsewhere", ["../other/model.safetensors", "/dev/zero"])
def test_weights_lie_beside_their_index(draft: Path, elsewhere: str) -> None:
    index = draft / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"fc.weight": elsewhere}}))
    for look in (check, read):
        with pytest.raises(ValueError, match="expected a weight_map from tensor names to files"):
            look(draft)


def test_a_file_that_only_engines_find(draft: Path) -> None:
    (draft / "model.safetensors").rename(draft / "other.safetensors")
    (found,) = [each for each in check(draft).findings if each.severity == "defect"]
    assert found.engine == "spec" and "model.safetensors is missing" in found.what


@pytest.mark.parametrize("text", ['"1234"', "[null, 1, 1, 1]", "[NaN, 1, 1, -1]", "null", "5"])
def test_temperatures_that_calibration_would_not_read(draft: Path, text: str) -> None:
    (draft / "sts.json").write_text(f'{{"temperatures": {text}}}')
    (found,) = [each for each in check(draft).findings if each.severity == "defect"]
    assert "expected a list of positive numbers" in found.what
    (draft / "sts.json").write_text('{"temperatures": [1, 1, 1, 1]}')
    assert not check(draft).has_defect


def defects(folder: Path) -> str:
    return " ".join(each.what for each in check(folder).findings if each.severity == "defect")


def rescale(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    save_file(load_file(path) | {f"{UP}.{key}": value for key, value in tensors.items()}, path)


def test_scales_beyond_any_weight_and_scales_nobody_reads(tmp_path: Path) -> None:
    folder = fp8(tmp_path)
    rescale(folder, input_scale=torch.ones(1))
    assert f"{UP}.input_scale: the scheme of quantization_config has weight_scale" in defects(
        folder
    )
    with pytest.raises(ValueError, match="unexpected"):
        read(folder)
    rescale(folder, weight_scale=torch.full((256, 1), 1e30))
    assert "or more than 146" in defects(folder)


def test_a_quantization_config_that_says_other_than_is_read(tmp_path: Path) -> None:
    folder = fp8(tmp_path)
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    edit(folder, quantization_config={**config, "kv_cache_scheme": None, "sparsity_config": {}})
    assert not check(folder).findings[1:] and read(folder)
    for key in ("kv_cache_scheme", "sparsity_config"):
        edit(folder, quantization_config={**config, key: {"num_bits": 8}})
        with pytest.raises(ValueError, match="quantized .* in another way"):
            read(folder)
        assert any("not one that spec decodes" in each.what for each in check(folder).findings)
    edit(folder, quantization_config="fp8")
    assert "quantization_config is 'fp8', expected an object" in defects(folder)
