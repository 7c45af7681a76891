"""What is exported for z-lab is the same network there: its own package computes our numbers."""

import importlib.metadata
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from toy_drafter import dflash_config

from spec.dflash.draft import DFlashDraft
from spec.export.checkpoint import write
from spec.export.layouts import LAYOUTS


def zlab() -> ModuleType:
    """`dflash.model` of the package; not by name, which is a folder of this repository too."""
    try:
        path = importlib.metadata.distribution("dflash").locate_file("dflash/model.py")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the package dflash is not installed")
    spec = importlib.util.spec_from_file_location("zlab_dflash_model", str(path))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("layout", ["zlab", "sglang"])
def test_hidden_states_equal_z_labs(tmp_path: Path, layout: str, is_causal: bool) -> None:
    torch.manual_seed(0)
    ours = DFlashDraft(dflash_config(is_causal=is_causal)).eval()
    with torch.no_grad():
        for parameter in ours.parameters():  # norms too: at 1 a forgotten one would not show
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.2)
    name = "zlab" if layout == "zlab" else "sglang"
    write(ours.config, ours.state_dict(), tmp_path / "out", LAYOUTS[name])
    theirs = zlab().DFlashDraftModel.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert theirs.block_size == 4 and theirs.mask_token_id == 63
    assert list(theirs.target_layer_ids) == [1, 3]
    features, embeds = torch.randn(1, 9, 64), torch.randn(1, 4, 32)
    with torch.inference_mode():
        expected = theirs(
            target_hidden=features, noise_embedding=embeds, position_ids=torch.arange(13)[None]
        )
        cache, slot = ours.new_cache(1, 9), torch.tensor([0])
        ours.extend(cache, slot, features, torch.tensor([9]))
        found = ours.hidden(cache, slot, embeds)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0.0)
