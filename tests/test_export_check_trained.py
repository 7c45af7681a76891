"""config.json against what the drafter was trained with: a changed key is named, a copy is not."""

import json
from pathlib import Path
from typing import Any

import pytest
from toy_drafter import dflash_config, dspark_config, edit, saved

from spec.export.check import check
from spec.export.convert import export_draft


def trained(folder: Path, kind: str = "dflash") -> Path:
    """A drafter with the spec.json that training writes beside it."""
    config = dflash_config() if kind == "dflash" else dspark_config()
    record = {"config": config.to_json("float32"), "target": {"name": "toy", "revision": "0"}}
    (saved(folder, config) / "spec.json").write_text(json.dumps(record))
    return folder


def defects(folder: Path, **options: Any) -> list[str]:
    found = check(folder, **options).findings
    return [each.what for each in found if each.severity == "defect"]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_what_training_wrote_has_no_defect(tmp_path: Path, kind: str) -> None:
    assert defects(trained(tmp_path / "d", kind)) == []


def test_other_layouts_say_the_same_in_other_words(tmp_path: Path) -> None:
    folder = trained(tmp_path / "d")
    export_draft(folder, tmp_path / "zlab", "zlab")
    export_draft(folder, tmp_path / "vllm", "vllm")
    assert defects(tmp_path / "zlab", engine="zlab") == []
    assert defects(tmp_path / "vllm", engine="vllm") == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"target_layer_ids": [0, 2]}, "target_layer_ids is [0, 2], the drafter was trained with"),
        ({"mask_token_id": 5}, "mask_token_id is 5, the drafter was trained with 63"),
        ({"block_size": 3}, "block_size is 3, the drafter was trained with 4"),
        ({"is_causal": True}, "is_causal is True, the drafter was trained with False"),
        ({"markov_head_type": "gated"}, "markov_head_type is gated, the drafter was trained with"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": 1e6},
            "'rope_theta': 1000000.0}, the drafter was trained with",
        ),
    ],
)
def test_a_changed_key_is_named_with_both_values(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    folder = trained(tmp_path / "d", "dspark")
    edit(folder, **changes)
    assert any(named in line for line in defects(folder)), defects(folder)


@pytest.mark.parametrize("content", [None, "not json", "[]", '{"config": 3}', "{}"])
def test_without_a_record_nothing_is_said(tmp_path: Path, content: str | None) -> None:
    folder = trained(tmp_path / "d", "dspark")
    edit(folder, mask_token_id=5)
    (folder / "spec.json").unlink()
    if content is not None:
        (folder / "spec.json").write_text(content)
    assert defects(folder) == []
