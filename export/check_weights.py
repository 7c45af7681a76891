"""What in a drafter's weights does not fit its config.json."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from ..dflash.unsupported import not_neutral
from ..target.tensors import Stored
from .findings import Finding, Subject, defect, note, warning
from .layouts import TARGET_TENSORS, all_keys
from .outline import (
    CONFIDENCE,
    as_stored,
    judged_tensors,
    layer_of,
    num_layers,
    outline,
    own_vocabulary,
    with_markov,
)
from .quantization_config import EIGHT_BITS
from .speculators import OTHER_TENSORS

STORED_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
HEAD_NAME = re.compile(
    r"markov_head\.(markov_w[12]\.weight|(gate_proj|joint_proj)\.(weight|bias))"
    r"|confidence_head\.proj\.(weight|bias)"
)
SHOWN = 4  # names of a long list
MARKOV_OUT = "markov_head.markov_w2.weight"
OWN_HEAD = ("lm_head.weight", "d2t", "t2d")  # of a draft vocabulary
HEAD_OF = {"gate_proj": "gated", "joint_proj": "rnn"}


def check_weights(s: Subject) -> Iterator[Finding]:
    """All findings about the weights; those about shapes only where the config states the sizes."""
    yield from _values(s)
    yield from _foreign(s)
    yield from _vocabulary(s)
    yield from _dtypes(s)
    yield from _confidence(s)
    whole = outline(s)
    if whole is not None:
        expected = as_stored(s, whole)
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
        and not (name in OWN_HEAD and own_vocabulary(s))
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


def _vocabulary(s: Subject) -> Iterator[Finding]:
    """A draft vocabulary of its own is vLLM's alone: its head, and which tokens the rows are."""
    draft, vocab = own_vocabulary(s), s.whole("vocab_size")
    if draft is None:
        return
    said = f"draft_vocab_size is {draft} of {vocab}"
    yield defect(
        f"{said}: SGLang drafts with the target's whole head",
        "train one with the full vocabulary",
        "SGLang",
    )
    yield warning(
        f"{said}; spec reads only drafters that use the target's whole head",
        "evaluate it in vLLM",
        "spec",
    )
    shapes = {"lm_head.weight": (draft, s.whole("hidden_size")), "d2t": (draft,), "t2d": (vocab,)}
    wrong = [
        f"{name} is {list(s.tensors[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in s.tensors and s.tensors[name].shape != shape
    ]
    if wrong:
        yield defect(
            f"shapes of the draft vocabulary: {'; '.join(wrong)}",
            "write the draft_vocab_size it was trained with",
        )
    if "d2t" not in s.tensors:
        yield warning(
            f"{said}, and no d2t says which tokens its rows are", "save the drafter again with it"
        )


def _confidence(s: Subject) -> Iterator[Finding]:
    """A key that SGLang takes for true where there is a Markov head."""
    rank, weight = s.whole("markov_rank") or 0, judged_tensors(s).get(CONFIDENCE)
    stated = s.own.get("confidence_head_with_markov")
    if stated is not None or weight is None or not s.own.get("enable_confidence_head"):
        return
    told, taken = (str(each).lower() for each in (with_markov(s), rank > 0))
    what = f"confidence_head_with_markov is not stated; the weights say {told}"
    if told == taken:
        yield warning(what, f"write {told}, as SGLang takes it; spec demands the key")
    else:
        yield defect(f"{what}, SGLang takes it for {taken}", f"write {told}", "SGLang")


def _dtypes(s: Subject) -> Iterator[Finding]:
    stated = s.data.get("dtype", s.data.get("torch_dtype"))
    found = {v.dtype for v in judged_tensors(s).values()} - set(EIGHT_BITS)
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
    plain = judged_tensors(s)
    missing = [name for name in expected if name not in plain]
    extra = [name for name in plain if name not in expected]
    stated, held = s.whole("num_hidden_layers") or 0, num_layers(plain)
    if stated != held:
        fate = "random or zero weights" if stated > held else "ignored without an error"
        yield defect(
            f"config.json says {stated} draft layers, the file holds {held}; the difference is "
            f"{fate}",
            f"write num_hidden_layers {held} if that is what was trained, or complete the file",
        )
        beyond = min(stated, held)
        missing = [name for name in missing if layer_of(name) < beyond]
        extra = [name for name in extra if layer_of(name) < beyond]
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
    # Of another network, which config.json names, we know no tensors.
    if extra and not not_neutral(all_keys(s.data, s.own)):
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
    plain = judged_tensors(s)
    wrong = [n for n, size in expected.items() if n in plain and plain[n].shape != tuple(size)]
    if own_vocabulary(s) and MARKOV_OUT in wrong:
        wrong.remove(MARKOV_OUT)  # not judged: it has a row a token of one of the vocabularies
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


def some(names: list[str] | tuple[str, ...]) -> str:
    """The first names of a list, and how many more."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
