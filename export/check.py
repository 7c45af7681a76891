"""`spec check`: what a drafter directory is, and what would go wrong with it on which engine."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..dflash.config import read_config
from ..dflash.files import weight_files
from ..dspark.calibration import STS, read_sts
from ..dspark.config import HEAD_KEYS, DSparkConfig
from ..target.tensors import stored_tensors
from .check_config import check_config
from .check_quantization import check_quantization, describe, tensor_parallel
from .check_target import check_target
from .check_trained import check_trained
from .check_weights import broken_tensors, check_weights
from .counts import sglang_options
from .findings import READERS, Engine, Finding, Subject, by_severity, defect, has_defect
from .layouts import Layout, detect, parts_of, read_native
from .outline import is_scale, plain_tensors, with_markov
from .quantization_config import EIGHT_BITS, KEYS, is_fp4, packed_projections, stated_quantization

SLOTS = {
    False: "slot 0 (the anchor) drafts nothing, slot j the token at anchor + j",
    True: "slot j drafts the token at anchor + j + 1, the anchor's slot 0 too",
}


# What SGLang builds; of each, spec computes the first alone.
LAYER_TYPES = ("full_attention", "sliding_attention")
ACTIVATIONS = ("silu", "swigluoai")


@dataclass(frozen=True)
class Report:
    """What `spec check` prints."""

    facts: dict[str, Any]
    findings: list[Finding]

    @property
    def has_defect(self) -> bool:
        return has_defect(self.findings)

    def to_json(self) -> dict[str, Any]:
        return {**self.facts, "findings": [asdict(finding) for finding in self.findings]}


def check(directory: str | Path, *, target: str | None = None, engine: Engine = "sglang") -> Report:
    """Examine a drafter directory for an engine, with `target` also against that model.

    Raises ValueError or FileNotFoundError where there is no drafter to read at all.
    """
    subject = look_at(Path(directory))
    if subject.refusal is not None:
        findings = [defect(subject.refusal, "convert it where it was made, or train one anew")]
    else:
        findings = [*check_config(subject), *check_weights(subject), *check_quantization(subject)]
        findings += [*check_trained(subject), *_refused(subject), *_sts(subject)]
        findings += _unreadable(subject, findings)
    if target is not None:
        findings += check_target(subject, target)
    asked = READERS[engine]
    told = [each for each in findings if each.engine in ("all", "spec", asked)]
    return Report(facts_of(subject, engine), by_severity(told))


def look_at(directory: Path, *, values: bool = True) -> Subject:
    """Read config.json and every tensor once; without `values` only headers. Raises as `check`."""
    data, where = read_config(directory), str(directory / "config.json")
    layout = detect(data, where=where)
    native, refusal = data, None
    try:
        native = _to_native(layout, data)
    except ValueError as error:
        refusal = str(error)
    nested = native.get("dflash_config")
    own = {**native, **(nested if isinstance(nested, dict) else {})}
    try:
        tensors = stored_tensors(directory)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{directory}: the safetensors index or a header is not one ({error!r}); copy it again"
        ) from None
    if not tensors:
        raise FileNotFoundError(f"no drafter weights at {directory}: no *.safetensors with tensors")
    broken = broken_tensors(directory, tensors) if values else ()
    return Subject(directory, data, own, layout, labelled_dspark(data), tensors, broken, refusal)


def _to_native(layout: Layout, data: dict[str, Any]) -> dict[str, Any]:
    """The native config.json, also of a draft vocabulary, which has findings of its own."""
    own = type(size := data.get("draft_vocab_size")) is int and size > 0
    kept = {key: value for key, value in data.items() if not own or key != "draft_vocab_size"}
    return layout.to_native(kept, "config.json")


def labelled_dspark(data: dict[str, Any]) -> bool:
    """Whether a config.json that `detect` knows says that it is DSpark's."""
    if kind := data.get("speculators_model_type"):
        return kind == "dspark"
    parts = parts_of(data["architectures"])
    return parts is not None and parts.config is DSparkConfig


def _unreadable(s: Subject, findings: list[Finding]) -> list[Finding]:
    """What keeps `spec` from reading the config, where no finding has explained it."""
    if has_defect(each for each in findings if each.engine in ("all", "spec")):
        return []
    try:
        read_native(_explained(s, _to_native(s.layout, s.data)), "config.json")
        weight_files(s.directory)
    except FileNotFoundError as error:
        return [defect(str(error), "give the file that name, as engines need not", "spec")]
    except (ValueError, TypeError, AttributeError, KeyError) as error:
        # A number of target layers that is not stated has its own, milder finding.
        if s.own.get("num_target_layers") is None and "lacks num_target_layers;" in str(error):
            return []
        return [defect(str(error), "correct config.json", "spec")]
    return []


def _explained(s: Subject, native: dict[str, Any]) -> dict[str, Any]:
    """The native config without what has findings of its own, though spec refuses it."""
    # Of quantizations engines load more kinds, and from more keys, than are read here.
    stated = {key: value for key, value in native.items() if key not in KEYS}
    if s.is_dspark and s.own.get("confidence_head_with_markov") is None:
        stated["confidence_head_with_markov"] = with_markov(s)
    return stated


def _refused(s: Subject) -> Iterator[Finding]:
    """What SGLang stops at when it builds the drafter."""
    kinds, act = s.own.get("layer_types"), s.own.get("hidden_act", "silu")
    strange = [k for k in kinds if k not in LAYER_TYPES] if isinstance(kinds, list) else []
    if strange:
        yield defect(
            f"layer_types has {strange[0]!r}, which SGLang refuses",
            f"write what it was trained with ({', '.join(LAYER_TYPES)})",
            "SGLang",
        )
    if act not in ACTIVATIONS:
        yield defect(
            f"hidden_act is {act!r}, which SGLang refuses",
            f"write what it was trained with ({', '.join(ACTIVATIONS)})",
            "SGLang",
        )


def _sts(s: Subject) -> list[Finding]:
    """Calibrated temperatures must be one a drafted token."""
    path, block = s.directory / STS, s.whole("block_size")
    if not path.is_file() or not s.is_dspark or block is None:
        return []
    try:
        found = len(read_sts(path))
    except (ValueError, OSError) as error:
        return [defect(str(error), "spec calibrate writes a new one")]
    if found == block:
        return []
    return [
        defect(
            f"sts.json has {found} temperatures, the drafter drafts {block} tokens",
            "spec calibrate writes a new one",
        )
    ]


def facts_of(s: Subject, engine: Engine) -> dict[str, Any]:
    """What the directory is, by its own words."""
    block, ids = s.whole("block_size"), s.layer_ids
    drafts = None if block is None else block - (0 if s.is_dspark else 1)
    _, quantization = stated_quantization(s)
    quantized = _quantized(s, quantization)
    dtypes: dict[str, int] = {}
    for stored in s.tensors.values():
        dtypes[stored.dtype] = dtypes.get(stored.dtype, 0) + stored.num_bytes
    return {
        "name": s.directory.resolve().name,
        "layout": f"{s.layout.name} ({s.layout.title})",
        "algorithm": "dspark" if s.is_dspark else "dflash",
        "slots": SLOTS[s.is_dspark],
        "target_layer_ids": ids,
        "layer_numbering": "from 0, the output of decoder layer k"
        + (
            f"; the file counts one higher: {[k + 1 for k in ids or []]}"
            * (s.layout.name == "vllm")
        ),
        "num_target_layers": s.own.get("num_target_layers"),
        "block_size": block,
        "num_draft_tokens": drafts,
        "mask_token_id": s.own.get("mask_token_id"),
        "heads": {key: s.own.get(key) for key in HEAD_KEYS} if s.is_dspark else None,
        "rope": _rope(s),
        "attention": _attention(s),
        "draft_layers": s.own.get("num_hidden_layers"),
        "hidden_size": s.own.get("hidden_size"),
        "vocab_size": s.own.get("vocab_size"),
        "dtype": s.data.get("dtype", s.data.get("torch_dtype")),
        "stored_bytes": dtypes,
        # Scales belong to how the weights are stored.
        "parameters": sum(stored.numel for name, stored in s.tensors.items() if not is_scale(name)),
        "quantized": quantized,
        "quantization": describe(quantization),
        "tensor_parallel": tensor_parallel(s),
        "checked_for": READERS[engine],
        "engine_options": _options(s, engine, drafts, quantized=quantized is not None),
    }


def _rope(s: Subject) -> dict[str, Any]:
    nested, scaling = s.own.get("rope_parameters"), s.own.get("rope_scaling")
    if nested and isinstance(nested, dict):
        return nested
    return {
        "rope_theta": s.own.get("rope_theta"),
        **(scaling if isinstance(scaling, dict) else {}),
    }


def _attention(s: Subject) -> str:
    kinds = s.own.get("layer_types") or ["full_attention"]
    causal = s.own.get("is_causal")
    within = {"None": "is_causal not stated", "True": "causal", "False": "bidirectional"}
    names = sorted(set(map(str, kinds))) if isinstance(kinds, list) else [str(kinds)]
    return f"{', '.join(names)}, {within.get(str(causal), 'is_causal unreadable')} in the block"


def _quantized(s: Subject, config: Any) -> str | None:
    """The type of the quantized weights; None where config.json and weights know none."""
    found = {stored.dtype for name, stored in s.tensors.items() if not is_scale(name)}
    if any(dtype.startswith("F8") for dtype in found):
        return "fp8"
    if is_fp4(config):
        return "fp4"
    if found & set(EIGHT_BITS):
        return "int8"
    return "packed" if packed_projections(s, plain_tensors(s)) else None


def _options(s: Subject, engine: Engine, drafts: int | None, *, quantized: bool) -> str | None:
    """How the engine's command line counts the same block; None where it does not load this."""
    if drafts is None or (s.layout.name == "vllm") != (engine == "vllm"):
        return None
    if engine == "vllm":
        return f"num_speculative_tokens {drafts}"
    if engine != "sglang":
        return None
    algorithm = "dspark" if s.is_dspark else "dflash"
    return " ".join(sglang_options(algorithm, drafts, quantized=quantized))
