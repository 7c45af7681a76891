"""`engine.arguments`: options the recipe passes on, without those it has keys for, or must not."""

from collections.abc import Collection, Iterable, Iterator

from ..export.findings import Finding
from ..recipes.schema import Algorithm
from ..target.launch import without_secrets
from .findings import defect, warning
from .recipe import ServeRecipe

# Options that a key of the recipe writes, under each of the engine's spellings.
KEYS = {
    "--model-path": "target.path",
    "--model": "target.path",
    "--quantization": "target.quantization",
    "--dtype": "target.dtype",
    "--trust-remote-code": "target.trust_remote_code",
    "--served-model-name": "engine.served_name",
    "--device": "engine.device",
    "--host": "engine.host",
    "--port": "engine.port",
    "--tp": "engine.tensor_parallel",
    "--tp-size": "engine.tensor_parallel",
    "--tensor-parallel-size": "engine.tensor_parallel",
    "--pp": "engine.pipeline_parallel",
    "--pp-size": "engine.pipeline_parallel",
    "--pipeline-parallel-size": "engine.pipeline_parallel",
    "--attn-dp-size": "engine.attention_data_parallel",
    "--attention-data-parallel-size": "engine.attention_data_parallel",
    "--enable-dp-attention": "engine.attention_data_parallel",
    "--enable-dp-lm-head": "engine.attention_data_parallel",
    "--attention-backend": "engine.attention_backend",
    "--kv-cache-dtype": "engine.kv_cache_dtype",
    "--mem-fraction-static": "engine.memory_fraction",
    "--context-length": "engine.context_length",
    "--max-running-requests": "engine.max_running_requests",
    "--chunked-prefill-size": "engine.chunked_prefill_size",
    "--enable-hierarchical-cache": "engine.hicache",
    "--enable-hicache": "engine.hicache",
    "--hicache-ratio": "engine.hicache.ratio",
    "--hicache-size": "engine.hicache.gigabytes",
    "--hicache-write-policy": "engine.hicache.write_policy",
    "--hicache-storage-backend": "engine.hicache.storage",
    "--enable-metrics": "engine.metrics",
    "--return-input-ids": "engine.return_token_ids",
    "--return-output-ids": "engine.return_token_ids",
    "--reasoning-parser": "engine.reasoning_parser",
    "--tool-call-parser": "engine.tool_call_parser",
    "--speculative-algorithm": "draft.algorithm",
    "--speculative-draft-model-path": "draft.path",
    "--speculative-draft-model": "draft.path",
    "--speculative-num-draft-tokens": "draft.num_draft_tokens",
    "--speculative-dflash-block-size": "draft.num_draft_tokens",
    "--speculative-dspark-block-size": "draft.num_draft_tokens",
    "--speculative-draft-model-quantization": "draft.quantization",
    "--speculative-draft-attention-backend": "draft.attention_backend",
    "--speculative-draft-kv-cache-dtype": "draft.kv_cache_dtype",
    "--speculative-draft-window-size": "draft.window",
    "--speculative-dspark-confidence-sts-path": "draft.sts",
    "--speculative-dspark-sps-table-path": "draft.sps",
}
# Refused by the engine, or worse: (why, for which algorithms).
BOTH: tuple[Algorithm, ...] = ("dflash", "dspark")
WITHOUT_TLS = "our own requests to the engine are plain HTTP; put TLS in front of it"
REFUSED: dict[str, tuple[str, tuple[Algorithm, ...]]] = {
    "--disaggregation-decode-enable-radix-cache": (
        "the engine refuses a decode server with a radix cache beside DFLASH",
        ("dflash",),
    ),
    "--enable-return-hidden-states": (
        "a speculative server refuses requests for hidden states; capture from a server without a "
        "drafter",
        BOTH,
    ),
    "--enable-return-aux-hidden-states": (
        "a speculative server refuses requests for hidden states; capture from a server without a "
        "drafter",
        BOTH,
    ),
    "--speculative-accept-threshold-single": (
        "it accepts tokens that the target would not have chosen: the output is no longer the "
        "target's",
        BOTH,
    ),
    "--speculative-accept-threshold-acc": (
        "it accepts tokens that the target would not have chosen: the output is no longer the "
        "target's",
        BOTH,
    ),
    "--enable-watermark": ("the engine refuses watermarks beside these drafters", BOTH),
    "--config": ("the options of that file are seen by none of our checks", BOTH),
    "--ssl-certfile": (WITHOUT_TLS, BOTH),
    "--ssl-keyfile": (WITHOUT_TLS, BOTH),
    "--": ("the engine takes no words behind it", BOTH),
}
# Taken without an error and then not used.
IGNORED: dict[str, str] = {
    "--speculative-adaptive": "for EAGLE only; DSpark adapts by its confidence and draft.sps",
    "--speculative-adaptive-config": "for EAGLE only; DSpark adapts by its confidence",
    "--speculative-num-steps": "the engine sets it to 1; draft.num_draft_tokens is the length",
    "--speculative-eagle-topk": "the engine sets it to 1: a block is one chain",
    "--speculative-use-rejection-sampling": "for EAGLE only",
    "--speculative-token-map": "for EAGLE only: these drafters use the target's whole head",
    "--speculative-draft-sink-size": "the window of a DFlash drafter has no sink",
}
# Of `spec verify`, which writes these itself: from which of its own options.
VERIFIED = {
    "target.path": "--target",
    "target.dtype": "--dtype",
    "engine.device": "--device",
    "engine.tensor_parallel": "--tp",
    "engine.host": "no option: it serves itself alone",
    "engine.port": "no option: it takes a free one",
    "draft.path": "the drafter's DIRECTORY",
    "draft.algorithm": "the drafter's config.json",
    "draft.num_draft_tokens": "the drafter's config.json",
}


def examine_arguments(recipe: ServeRecipe) -> Iterator[Finding]:
    """What in `engine.arguments` has a key, is refused, or does nothing."""
    words = recipe.engine.arguments
    refused = {
        name: why for name, (why, where) in REFUSED.items() if recipe.draft.algorithm in where
    }
    known = {*KEYS, *refused, *IGNORED}
    if words and not words[0].startswith("-"):
        yield defect(
            f"engine.arguments starts with {words[0]!r}; expected an option",
            "write each word as an entry: [--page-size, '64']",
        )
    for word in words:
        name = full_name(word, known)
        if word.startswith("--") and " " in word.partition("=")[0]:
            yield defect(
                f"engine.arguments has {' '.join(without_secrets(word.split()))!r} as one word",
                "write each word as an entry: [--page-size, '64']",
            )
        elif name in KEYS:
            yield defect(
                f"{_shown(word, name)} in engine.arguments: the key {KEYS[name]} writes it",
                f"set {KEYS[name]} and remove it there",
            )
        elif name in refused:
            yield defect(
                f"{_shown(word, name)} in engine.arguments: {refused[name]}", "remove it there"
            )
        elif name in IGNORED:
            yield warning(
                f"{_shown(word, name)} in engine.arguments has no effect: {IGNORED[name]}",
                "remove it there",
            )


def check_arguments(words: Iterable[str]) -> None:
    """More options for the engine of `spec verify`: it compares what it started itself.

    Raises ValueError for one that it writes from its own options, or that changes the output.
    """
    own = {name: key for name, key in KEYS.items() if key in VERIFIED}
    refused = {name: why for name, (why, where) in REFUSED.items() if where == BOTH}
    for word in words:
        name = full_name(word, {*own, *refused})
        if name in own:
            source = VERIFIED[own[name]]
            raise ValueError(
                f"{_shown(word, name)} after --: spec verify writes it, from {source}; remove it"
            )
        if name in refused:
            raise ValueError(f"{_shown(word, name)} after --: {refused[name]}; remove it")


def full_name(word: str, known: Collection[str]) -> str | None:
    """The known option that a word of a command line stands for; None where it is none of them.

    The engine takes a beginning that fits one option for the whole name. No option that it has
    begins one of ours, but those that are ours themselves.
    """
    name = word.partition("=")[0].replace("_", "-")
    if name in known:
        return name
    beginning = name.startswith("--") and len(name) > 2
    return next((each for each in sorted(known) if beginning and each.startswith(name)), None)


def _shown(word: str, name: str) -> str:
    """An option as it was written, and in full where that differs."""
    written = word.partition("=")[0]
    return written if written == name else f"{written} (that is {name})"
