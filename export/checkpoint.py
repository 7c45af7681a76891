"""A drafter directory of any layout, read strictly and written so that it reads back the same."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers.models.qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from ..dflash.config import DFlashConfig, read_config
from ..dflash.files import PROVENANCE, check_tensors, check_values, read_weights
from ..dflash.layers import rope_frequencies
from ..dflash.unsupported import refuse_unsupported
from ..dspark.calibration import STS
from ..dspark.schedule import SPS
from ..eval.report import REPORT
from ..target.saving import atomic_directory
from .layouts import Layout, all_keys, detect, expected_shapes, parts_of, read_native

SIDE_FILES = (PROVENANCE, REPORT, STS, SPS)  # go where the drafter goes; its bits are the same
MAX_SHARD = "5GB"
ROTATED = (
    *("hidden_size", "num_attention_heads", "head_dim", "max_position_embeddings"),
    *("rope_parameters", "rope_theta", "rope_scaling"),
    *("partial_rotary_factor", "original_max_position_embeddings"),
)


@dataclass(frozen=True)
class Given:
    """What the user says of a drafter whose config.json does not; None: nothing.

    Layer ids as everywhere: the output of decoder layer k, counted from 0.
    """

    target_layer_ids: list[int] | None = None
    mask_token_id: int | None = None
    block_size: int | None = None
    num_target_layers: int | None = None

    def fill(self, native: dict[str, Any], where: str) -> dict[str, Any]:
        """`native` with what it leaves out.

        Raises ValueError where something is still missing, or was given as another value.
        """
        nested = native.get("dflash_config")
        nested = dict(nested) if isinstance(nested, dict) else {}
        filled, missing = dict(native), []
        for field in fields(self):
            value, option = getattr(self, field.name), OPTIONS[field.name]
            found = nested.get(field.name, native.get(field.name))
            if found is None and value is None:
                missing.append((field.name, option))
            elif found is None:
                # A null inside dflash_config would win over the top level.
                (nested if field.name in nested else filled)[field.name] = value
            elif value is not None and found != value:
                raise ValueError(
                    f"{where}: {field.name} is {found}, {option} says {value}; leave the option "
                    "out, or correct the file"
                )
        if missing:
            names, options = (", ".join(part) for part in zip(*missing, strict=True))
            raise ValueError(
                f"{where} leaves out {names}: give {options} as it was trained; nothing is guessed"
            )
        return {**filled, "dflash_config": nested} if nested else filled


OPTIONS = {
    "target_layer_ids": "--layer-ids",
    "mask_token_id": "--mask-token-id",
    "block_size": "--block-size",
    "num_target_layers": "--num-target-layers (or --target)",
}


@dataclass(frozen=True)
class Checkpoint:
    """A drafter as it was read: its tensors by native name, the target's own kept apart."""

    layout: Layout
    config: DFlashConfig
    tensors: dict[str, Tensor]
    carried: dict[str, Tensor]

    @property
    def dtype(self) -> torch.dtype:
        return self.tensors["fc.weight"].dtype


def read(directory: str | Path, given: Given | None = None) -> Checkpoint:
    """Read a drafter directory of whatever layout, strictly.

    Raises ValueError or FileNotFoundError that names what is missing, unexpected or unsupported.
    """
    data, where = read_config(directory), str(Path(directory) / "config.json")
    layout = detect(data, where=where)
    if data.get("quantization_config") and not layout.says_quantization:
        raise ValueError(
            f"{where}: the weights are quantized; convert the drafter they were made from"
        )
    native = layout.to_native(data, where)
    config = read_native((given or Given()).fill(native, where), where)
    refuse_unsupported(all_keys(data, native), where)
    parts = parts_of(list(config.architectures))
    assert parts is not None
    tensors = read_weights(directory)
    theirs = {*layout.target_tensors, *parts.draft.target_tensors}
    carried = {name: tensors.pop(name) for name in sorted(theirs & tensors.keys())}
    check_tensors(tensors, expected_shapes(config), directory)
    check_values(tensors, directory)
    _check_vocabulary(carried, directory)
    check_rope(config, data, where)
    return Checkpoint(layout, config, tensors, carried)


def _check_vocabulary(carried: dict[str, Tensor], directory: str | Path) -> None:
    """Maps between a draft vocabulary and the target's must map each token to itself."""
    draft_to_target, target_to_draft = carried.pop("d2t", None), carried.pop("t2d", None)
    moves = draft_to_target is not None and bool(draft_to_target.any())  # offsets
    drops = target_to_draft is not None and not bool(target_to_draft.all())
    if moves or drops:
        raise ValueError(
            f"{directory}: d2t and t2d map a vocabulary of its own; only drafters that use the "
            "target's whole head are supported"
        )


def write(
    config: DFlashConfig,
    tensors: Mapping[str, Tensor],
    out: str | Path,
    layout: Layout,
    *,
    target_name: str | None = None,
    carried: Mapping[str, Tensor] | None = None,
    beside: str | Path | None = None,
) -> None:
    """Write a drafter directory, all of it or nothing, and read it back.

    `carried` are the target's tensors for a layout that stores them, `beside` a directory whose
    `SIDE_FILES` go along. Raises ValueError where `out` holds something, or
    where what was written does not read back bit for bit, RoPE included.
    """
    extra = carried or {}
    assert set(extra) == (set(layout.target_tensors) if layout.carries_target else set())
    dtype = str(tensors["fc.weight"].dtype).removeprefix("torch.")
    data = layout.to_json(config, dtype, target_name)
    with atomic_directory(Path(out)) as building:
        # Cloned: tied matrices share their memory, and only one of them would be stored.
        stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
        stored |= {name: value.detach().cpu().clone() for name, value in extra.items()}
        save_torch_state_dict(stored, building, max_shard_size=MAX_SHARD)
        for file in building.glob("*.safetensors"):
            file.chmod(0o644)  # made private
        (building / "config.json").write_text(json.dumps(data, indent=2) + "\n")
        for name in SIDE_FILES if beside is not None else ():
            if (Path(beside or "") / name).is_file():
                shutil.copyfile(Path(beside or "") / name, building / name)
        verify(building, config, stored)


def verify(directory: Path, config: DFlashConfig, tensors: Mapping[str, Tensor]) -> None:
    """Raise ValueError unless the directory holds this config and these tensors, bit for bit."""
    found = read(directory)
    if found.config != config:
        changed = [
            field.name
            for field in fields(config)
            if getattr(found.config, field.name) != getattr(config, field.name)
        ]
        raise ValueError(
            f"config.json reads back with another {', '.join(changed)}: not written; give a "
            "drafter that this layout can describe"
        )
    stored = found.tensors | found.carried
    changed = [name for name, value in tensors.items() if not same_bits(stored.get(name), value)]
    if changed or stored.keys() != tensors.keys():
        raise ValueError(
            f"{len(changed)} tensors read back with other bits ({', '.join(changed[:3])}): not "
            "written; try again, and check the disk"
        )


def check_rope(config: DFlashConfig, data: dict[str, Any], where: str = "config.json") -> None:
    """Raise ValueError unless an engine that has only config.json rotates by the same angles.

    `data` is the file as it lies there, whatever its layout: not what was read of it.
    """
    source = data.get("transformer_layer_config", data)
    try:
        engine = Qwen3Config(**{key: source[key] for key in ROTATED if source.get(key) is not None})
        table = Qwen3RotaryEmbedding(engine)
    except (StrictDataclassError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{where}: transformers refuses its RoPE: {error}") from None
    inverse, scale = rope_frequencies(config)
    found = table.inv_freq
    assert isinstance(found, Tensor)
    if not torch.equal(found, inverse) or table.attention_scaling != scale:
        raise ValueError(
            f"{where}: the RoPE tables that transformers builds from it are not those of "
            f"{config.rope_parameters}, as it was read; state rope_parameters (rope_theta, "
            "rope_type) alone, as it was trained"
        )


def same_bits(a: Tensor | None, b: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits (0.0 and -0.0 differ)."""
    if a is None or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
