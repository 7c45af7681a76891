"""`spec export` and `spec import`: from one layout to another, nothing guessed, nothing lost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.models.qwen3 import Qwen3Config

from ..dflash.config import BACKBONE_KEYS, DFlashConfig, read_config
from ..dflash.draft import DFlashDraft
from ..dflash.files import read_provenance, stated
from ..dflash.unsupported import NEUTRAL
from ..dspark.config import HEAD_KEYS, DSparkConfig
from ..eval.pair import check_pair
from ..target.files import resolve
from ..target.inspect import inspect_target
from ..target.model import Target
from .check import Report, check
from .checkpoint import ROTATED, Checkpoint, Given, read, write
from .findings import by_severity, warning
from .layouts import LAYOUTS, LayoutName, detect, parts_of

# Keys of a config.json that are carried over, are at their neutral value (or it would have been
# refused), or say nothing about the network. What stands in none of these is told.
NESTED = ("dflash_config", "transformer_layer_config")
KNOWN = frozenset(
    (
        *(*BACKBONE_KEYS, *DSparkConfig.required_keys, *HEAD_KEYS, *NEUTRAL, *NESTED),
        *(*ROTATED, "is_causal", "input_embedding_scale", "quantization_config"),
        *("sample_from_anchor", "num_anchors", "mask_token"),
        *("speculators_model_type", "speculators_version", "speculators_config"),
        *("aux_hidden_state_layer_ids", "draft_vocab_size", "sliding_window_non_causal"),
        *(*Qwen3Config().to_dict(), "torch_dtype", "auto_map"),
    )
)


def export_draft(
    draft: str | Path, out: str | Path, to: LayoutName, *, target: str | None = None
) -> Report:
    """Write the drafter of a directory in another layout; returns what `check` says of it.

    `target` is the model it belongs to: DeepSpec's layout holds its embedding and head, vLLM's its
    name. Raises ValueError where the layout cannot describe the drafter, or where it needs the
    target and none was given.
    """
    found, layout = read(draft), LAYOUTS[to]
    obstacle = layout.obstacle(found.config)
    if obstacle is not None:
        raise ValueError(
            f"{draft} cannot be written for {to} ({layout.title}): {obstacle}; expected a drafter "
            "that it describes: choose another --to"
        )
    name, carried = None, None
    if layout.carries_target:
        carried = target_tensors(found, target, to)
    elif to == "vllm":
        name = target_name(draft, target)
    write(
        found.config,
        found.tensors,
        out,
        layout,
        target_name=name,
        carried=carried,
        beside=draft,
    )
    return _with_dropped(check(out, engine=to), draft)


def import_draft(
    directory: str | Path,
    out: str | Path,
    *,
    given: Given | None = None,
    target: str | None = None,
) -> Report:
    """Write a drafter of any layout as a native directory; returns what `check` says of it.

    `given` and `target` say what its config.json leaves out. Where the file carries the target's
    embedding or head, they are compared with those of `target` and left out.
    """
    given = given or Given()
    if target is not None and given.num_target_layers is None and _states_no_layers(directory):
        given = replace(given, num_target_layers=inspect_target(target).layers)
    found = read(directory, given)
    if target is not None and found.carried:
        _check_pair(found, Target.load(target, dtype=found.dtype))
    write(found.config, found.tensors, out, LAYOUTS["sglang"], beside=directory)
    return _with_dropped(check(out, target=target), directory)


def dropped(data: dict[str, Any]) -> list[str]:
    """Keys of a config.json, dotted, that mean nothing here and so are not in what is written."""
    found = [key for key, value in data.items() if value is not None and key not in KNOWN]
    for key in NESTED:
        inner = data.get(key)
        found += [f"{key}.{name}" for name in dropped(inner)] if isinstance(inner, dict) else []
    return found


def _with_dropped(report: Report, source: str | Path) -> Report:
    keys = dropped(read_config(source))
    if not keys:
        return report
    told = warning(
        f"left out, for spec does not know them: {', '.join(keys)} (of the config.json read)",
        "where the network depends on one of them, this is another drafter: do not use it",
    )
    return replace(report, findings=by_severity([*report.findings, told]))


def target_tensors(found: Checkpoint, target: str | None, to: LayoutName) -> dict[str, Tensor]:
    """The target's embedding and head, for a layout whose file holds them."""
    if target is None:
        raise ValueError(
            f"{to}'s file holds the target's embedding and head, which a drafter does not store: "
            "give --target"
        )
    loaded = Target.load(target, dtype=found.dtype)
    _check_pair(found, loaded)
    if loaded.head_bias is not None:
        raise ValueError(f"{loaded.name}: its head has a bias, which {to}'s layout cannot hold")
    embedding, head = loaded.embedding.detach(), loaded.head.detach()
    return {"embed_tokens.weight": embedding, "lm_head.weight": head}


def target_name(draft: str | Path, target: str | None) -> str:
    """What the target is called: `--target`, or what spec.json says; never a path."""
    if target is not None:
        return resolve(target, need_weights=False)[1]
    name = stated(read_provenance(draft), "target", "name")
    if name is None:
        raise ValueError(
            f"{draft} does not say which target it belongs to (spec.json), and vLLM's layout "
            "names it: give --target"
        )
    return str(name)


def _states_no_layers(directory: str | Path) -> bool:
    """Whether config.json leaves the number of the target's layers out."""
    data = read_config(directory)
    nested = data.get("dflash_config") or {}
    detect(data, where=str(Path(directory) / "config.json"))
    return {**data, **nested}.get("num_target_layers") is None


def _check_pair(found: Checkpoint, target: Target) -> None:
    """As `spec eval` does, on a draft without weights."""
    draft = _on_meta(found.config)
    draft.carried = dict(found.carried)
    check_pair(draft, target)


def _on_meta(config: DFlashConfig) -> DFlashDraft:
    parts = parts_of(list(config.architectures))
    assert parts is not None
    with torch.device("meta"):
        return parts.draft(config)
