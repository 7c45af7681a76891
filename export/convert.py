"""`spec export` and `spec import`: from one layout to another, nothing guessed, nothing lost."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..dflash.config import DFlashConfig, read_config
from ..dflash.draft import DFlashDraft
from ..dflash.files import read_provenance, stated
from ..eval.pair import check_pair
from ..target.files import resolve
from ..target.inspect import inspect_target
from ..target.model import Target
from .check import Report, check
from .checkpoint import Checkpoint, Given, read, write
from .layouts import LAYOUTS, LayoutName, detect, parts_of


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
    return check(out, engine=to)


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
    return check(out, target=target)


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
