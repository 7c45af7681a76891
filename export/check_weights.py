"""What in a drafter's weights does not fit its config.json."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..dflash.config import MAX_LAYERS, DFlashConfig
from ..dflash.fp8 import SCALE_NAMES
from ..dspark.config import DSparkConfig
from ..target.tensors import Stored
from .findings import Finding, Subject, defect, note, warning
from .layouts import TARGET_TENSORS, expected_shapes
from .speculators import OTHER_TENSORS

STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
EIGHT_BITS = ("F8_E4M3", "F8_E5M2", "I8", "U8")
SCALES = (*SCALE_NAMES.values(), "input_scale", "weight_scale_2")  # of other quantizers too
LAYER = re.compile(r"layers\.(\d+)\.")
HEAD_NAME = re.compile(
    r"markov_head\.(markov_w[12]\.weight|(gate_proj|joint_proj)\.(weight|bias))"
    r"|confidence_head\.proj\.(weight|bias)"
)
SHOWN = 4  # names of a long list
HEAD_OF = {"gate_proj": "gated", "joint_proj": "rnn"}
SHAPE_KEYS = (
    *("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "vocab_size"),
)


def check_weights(s: Subject) -> Iterator[Finding]:
    """All findings about the weights; those about shapes only where the config states the sizes."""
    yield from _values(s)
    yield from _foreign(s)
    yield from _dtypes(s)
    expected = outline(s)
    if expected is not None:
        yield from _names(s, expected)
        yield from _shapes(s, expected)


def broken_tensors(directory: Path, tensors: Mapping[str, Stored]) -> tuple[str, ...]:
    """Names of the tensors with NaN or infinity, one tensor in memory at a time.

    Raises ValueError where a file is cut short.
    """
    broken: list[str] = []
    for path in sorted({stored.file for stored in tensors.values()}):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():
                    value = file.get_tensor(name)
                    eight_bits = value.is_floating_point() and value.element_size() == 1
                    if not torch.isfinite(value.float() if eight_bits else value).all():
                        broken.append(name)
        except SafetensorError as error:
            raise ValueError(
                f"{directory / path.name}: not a whole safetensors file ({error}); copy it again"
            ) from None
    return tuple(broken)


def outline(s: Subject) -> dict[str, torch.Size] | None:
    """The tensors that a drafter of this config has, as far as its sizes are stated.

    Values that shape no tensor do not matter here: they have findings of their own.
    """
    sizes = {key: s.whole(key) for key in SHAPE_KEYS}
    if any(size is None or size < 1 for size in sizes.values()):
        return None
    # Findings end at the layers that the file holds, however many the config says.
    held = _num_layers(plain_tensors(s))
    sizes["num_hidden_layers"] = max(1, min(sizes["num_hidden_layers"] or 0, held, MAX_LAYERS))
    fc = plain_tensors(s).get("fc.weight")
    count = len(s.layer_ids or []) or (fc.shape[-1] // (sizes["hidden_size"] or 1) if fc else 1)
    common = {
        **sizes,
        "block_size": 2,
        "target_layer_ids": tuple(range(max(1, count))),
        "num_target_layers": max(1, count) + 1,
        "mask_token_id": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    rank = s.whole("markov_rank") or 0
    try:
        if not s.is_dspark:
            return expected_shapes(DFlashConfig(**common))
        return expected_shapes(
            DSparkConfig(
                **common,
                markov_rank=rank,
                markov_head_type=s.own.get("markov_head_type") or "vanilla",
                enable_confidence_head=bool(s.own.get("enable_confidence_head")),
                confidence_head_with_markov=bool(s.own.get("confidence_head_with_markov")),
            )
        )
    except (ValueError, TypeError, RuntimeError, ZeroDivisionError):
        return None


def plain_tensors(s: Subject) -> dict[str, Stored]:
    """The drafter's own tensors without the prefix `model.`, scales and the target's left out."""
    theirs = {*TARGET_TENSORS, *OTHER_TENSORS}
    named = {name.removeprefix("model."): stored for name, stored in s.tensors.items()}
    return {k: v for k, v in named.items() if k not in theirs and not is_scale(k)}


def is_scale(name: str) -> bool:
    """Whether a tensor scales another, by its name."""
    return name.rpartition(".")[2] in SCALES


def _values(s: Subject) -> Iterator[Finding]:
    if s.broken:
        yield defect(
            f"NaN or infinity in {some(s.broken)}",
            "copy the file again, or go back to an earlier checkpoint",
        )


def _foreign(s: Subject) -> Iterator[Finding]:
    theirs = [
        name
        for name in s.tensors
        if name.removeprefix("model.") in (*TARGET_TENSORS, *OTHER_TENSORS)
    ]
    size = sum(s.tensors[name].num_bytes for name in theirs) / 1e6
    if theirs and s.layout.target_tensors:
        yield note(
            f"the target's own {some(theirs)} in the file ({size:,.1f} MB), as this layout has it",
            "spec import DIR --out OUT leaves them out",
        )
    elif theirs:
        yield defect(
            f"tensors of the target in the file: {some(theirs)} ({size:,.1f} MB); engines use the "
            "target's own",
            "remove them; a drafter trained with an embedding or head of its own is not supported",
        )


def _dtypes(s: Subject) -> Iterator[Finding]:
    stated = s.data.get("dtype", s.data.get("torch_dtype"))
    found = {v.dtype for v in plain_tensors(s).values()} - set(EIGHT_BITS)
    if stated is None:
        yield warning(
            f"config.json states no dtype, the weights are {some(sorted(found))}", "state it"
        )
    elif found and found != {STORED_DTYPES.get(str(stated).removeprefix("torch."))}:
        yield defect(
            f"config.json says dtype {stated}, the weights are {some(sorted(found))}",
            "write what the file holds; or spec import DIR --out OUT",
        )


def _names(s: Subject, expected: Mapping[str, torch.Size]) -> Iterator[Finding]:
    plain = plain_tensors(s)
    missing = [name for name in expected if name not in plain]
    extra = [name for name in plain if name not in expected]
    stated, held = s.whole("num_hidden_layers") or 0, _num_layers(plain)
    if stated != held:
        fate = "random or zero weights" if stated > held else "ignored without an error"
        yield defect(
            f"config.json says {stated} draft layers, the file holds {held}; the difference is "
            f"{fate}",
            f"write num_hidden_layers {held} if that is what was trained, or complete the file",
        )
        beyond = min(stated, held)
        missing = [name for name in missing if _layer(name) < beyond]
        extra = [name for name in extra if _layer(name) < beyond]
    if s.is_dspark:
        kind, heads = s.own.get("markov_head_type"), _head_kind(plain)
        if heads is not None and kind in ("vanilla", "gated", "rnn") and kind != heads:
            yield defect(
                f"markov_head_type is {kind}, the head's weights are those of {heads}; SGLang "
                "drafts with an untrained gate or refuses",
                f"write markov_head_type {heads}",
            )
            missing = [name for name in missing if not _is_kind(name)]
            extra = [name for name in extra if not _is_kind(name)]
        yield from _misnamed_heads(s, missing, extra)
        missing = [name for name in missing if not _is_head(name)]
    # Without the label, _label has spoken of them.
    extra = [name for name in extra if not _is_head(name)]
    if missing:
        yield defect(
            f"missing: {some(missing)}; engines start without an error and accept next to nothing",
            "save the drafter again, or copy the whole file",
        )
    if extra:
        yield defect(
            f"unexpected: {some(extra)}; engines ignore names they do not know",
            "rename what is misnamed, remove what is not the drafter's",
        )


def _misnamed_heads(s: Subject, missing: list[str], extra: list[str]) -> Iterator[Finding]:
    """Head tensors that are not where the engine looks for them."""
    absent = [name for name in missing if _is_head(name)]
    strange = [name for name in extra if _is_head(name)]
    unused = [name for name in strange if HEAD_NAME.fullmatch(name)]
    strange = [name for name in strange if name not in unused]
    if unused:
        yield defect(
            f"{some(unused)} belong to a head that config.json does not have",
            "correct markov_rank, markov_head_type or enable_confidence_head, or remove them",
        )
    behind = [n for n in s.tensors if n.startswith("model.") and _is_head(n.removeprefix("model."))]
    if behind:
        yield warning(
            f"heads behind `model.`: {some(behind)}; SGLang 0.5.23 finds them all the same (seen: "
            "every request accepted as much), other readers may not",
            "rename them; spec import DIR --out OUT does it",
        )
    if strange:
        yield defect(
            f"heads under other names than engines look for: {some(strange)}, expected "
            f"{some(absent)}",
            "rename them",
        )
    elif absent:
        yield defect(
            f"missing: {some(absent)}", "save the drafter again, or correct the config's heads"
        )


def _shapes(s: Subject, expected: Mapping[str, torch.Size]) -> Iterator[Finding]:
    plain = plain_tensors(s)
    wrong = [n for n, size in expected.items() if n in plain and plain[n].shape != tuple(size)]
    if "fc.weight" in wrong:
        wrong.remove("fc.weight")
        found, (rows, columns) = plain["fc.weight"].shape, expected["fc.weight"]
        if found == (columns, rows):
            yield defect(
                f"fc.weight is transposed: {list(found)}, expected {[rows, columns]}",
                "store its transpose",
            )
        else:
            yield defect(
                f"fc.weight is {list(found)}, expected {[rows, columns]}: hidden size by "
                f"{columns // rows} layers' hidden states side by side",
                "make target_layer_ids those it was trained with",
            )
    if wrong:
        shapes = [f"{n} is {list(plain[n].shape)}, expected {list(expected[n])}" for n in wrong]
        yield defect(
            "shapes differ from config.json: " + "; ".join(shapes[:SHOWN]),
            "correct the sizes in config.json, or take the file that belongs to it",
        )


def _is_head(name: str) -> bool:
    return "markov" in name or "confidence" in name


def _is_kind(name: str) -> bool:
    return _is_head(name) and any(part in name for part in HEAD_OF)


def _head_kind(plain: Mapping[str, Stored]) -> str | None:
    """Which Markov head the file holds; None without one."""
    parts = {name.split(".")[-2] for name in plain if "markov" in name and "." in name}
    kinds = [kind for part, kind in HEAD_OF.items() if part in parts]
    return (kinds or ["vanilla"])[0] if parts else None


def _num_layers(plain: Mapping[str, Stored]) -> int:
    return max((_layer(name) for name in plain), default=-1) + 1


def _layer(name: str) -> int:
    """The draft layer that a tensor belongs to; -1 for the others."""
    match = LAYER.match(name)
    return int(match[1]) if match else -1


def some(names: list[str] | tuple[str, ...]) -> str:
    """The first names of a list, and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
