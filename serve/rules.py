"""What is wrong with a serving recipe before anything starts: the drafter, the counts, the engine.

Each rule yields findings as `spec check` does: a defect would be served wrongly or not at all.
"""

from collections.abc import Iterator

from ..export.findings import Finding, by_severity
from ..export.ranks import rank_obstacles
from ..target.launch import SIMULATED
from .arguments import examine_arguments
from .command import num_draft_tokens
from .findings import defect, warning
from .models import Models, is_hub_id
from .recipe import DRAFT_QUANTIZATIONS, ServeRecipe

# Of `--speculative-draft-attention-backend` on NVIDIA GPUs.
DRAFT_BACKENDS = ("flashinfer", "fa3", "fa4", "triton", "trtllm_mha")
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
OWN_DRAFTER = "give the drafter that was trained for this target"


def examine(recipe: ServeRecipe, models: Models) -> list[Finding]:
    """All findings, the worst first."""
    rules = (_drafter, _algorithm, _counts, _layers, _quantization, _context)
    rules += (_parallel, _draft_ranks, _backends, _modes)
    found = [each for rule in rules for each in rule(recipe, models)]
    return by_severity([*found, *examine_arguments(recipe), *models.absent])


def _drafter(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    """What `spec check` says of the directory, for SGLang: what only we cannot read is served."""
    if models.draft is not None:
        yield from (each for each in models.draft.findings if each.engine != "spec")


def _algorithm(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    if models.draft is None:
        return
    found = models.draft.facts["algorithm"]
    if found != recipe.draft.algorithm:
        yield defect(
            f"draft.algorithm is {recipe.draft.algorithm}, but {recipe.draft.path} is {found}",
            f"set draft.algorithm={found}",
        )


def _counts(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    asked = num_draft_tokens(recipe, models)
    trained = None if models.draft is None else models.draft.facts["num_draft_tokens"]
    # A directory that is not here has a finding of its own, in models.py.
    if asked is None and is_hub_id(recipe.draft.path):
        yield defect(
            f"draft.num_draft_tokens is not set and {recipe.draft.path} does not say it here",
            "set draft.num_draft_tokens as it was trained (DFlash: block size - 1, DSpark: block "
            "size)",
        )
    if asked is None or trained is None or asked == trained:
        return
    what = f"draft.num_draft_tokens is {asked}, {recipe.draft.path} was trained for {trained}"
    if recipe.draft.algorithm == "dspark" or asked > trained:
        yield defect(what, f"set draft.num_draft_tokens={trained}, or leave it out")
    else:
        yield warning(f"{what}: a shorter block than it knows", "compare the acceptance length")


def _layers(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    layers = models.target.layers if models.target else None
    ids = models.draft.facts["target_layer_ids"] if models.draft else None
    if ids and layers and max(ids) > layers - 2:
        yield defect(
            f"the drafter reads layers {ids} of a target of {layers} layers; engines capture the "
            f"output of layers 0 to {layers - 2}",
            OWN_DRAFTER,
        )


def _quantization(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    asked, found = recipe.draft.quantization, models.draft_quantization
    if asked is None and found is None and is_hub_id(recipe.draft.path):
        yield defect(
            f"draft.quantization is not set and {recipe.draft.path} does not say it here",
            "set draft.quantization=none for bf16 weights, compressed-tensors or fp8 for FP8",
        )
    known = found in DRAFT_QUANTIZATIONS
    if found is None or found == asked or (asked is None and known):
        return
    consequence = {
        None: "the engine's reading of it is not known",
        "none": "the engine would be told to leave it unquantized",
        "compressed-tensors": "it would take over the target's quantization",
        "fp8": "it would be quantized a second time, or read as what it is not",
    }[asked]
    yield defect(
        f"draft.quantization is {asked or 'not set'}, {recipe.draft.path} says {found}: "
        f"{consequence}",
        f"set draft.quantization={found}"
        if known
        else "expected none, compressed-tensors or fp8 (128 x 128 blocks); export it again",
    )


def _context(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    """The engine serves the drafter with the target's context, and refuses a shorter one."""
    if recipe.engine.environment.get(LONGER) == "1":
        return
    served = recipe.engine.context_length or (models.target and models.target.positions)
    own = models.draft_shape.get("max_position_embeddings")
    rope = models.draft_shape.get("rope_parameters") or models.draft_shape.get("rope_scaling")
    stretched = isinstance(rope, dict) and rope.get("rope_type", "default") != "default"
    if served and type(own) is int and own < served and not stretched:
        yield defect(
            f"the drafter has {own} positions, the server a context of {served}: the engine "
            "refuses to start",
            f"set engine.context_length={own}, or engine.environment={{{LONGER}: '1'}} where the "
            "drafter holds up on longer ones",
        )


def _parallel(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    engine = recipe.engine
    ranks, groups = engine.tensor_parallel, engine.attention_data_parallel
    if engine.pipeline_parallel > 1:
        yield defect(
            f"engine.pipeline_parallel is {engine.pipeline_parallel}; drafters need 1",
            "set engine.pipeline_parallel=1 and raise engine.tensor_parallel",
        )
    if ranks % groups:
        yield defect(
            f"engine.attention_data_parallel {groups} does not divide engine.tensor_parallel "
            f"{ranks}",
            "the groups share out the tensor-parallel ranks: give a divisor",
        )
        return
    heads = models.target.heads if models.target else None
    if heads and heads % (ranks // groups):
        yield defect(
            f"{ranks // groups} ranks do not divide the target's {heads} attention heads",
            "give an engine.tensor_parallel that does",
        )


def _draft_ranks(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    """The engine shares the drafter out to the ranks of one attention group, not to all of them."""
    engine = recipe.engine
    ranks, rest = divmod(engine.tensor_parallel, engine.attention_data_parallel)
    if rest:
        return  # of that there is a finding
    for what in rank_obstacles(models.draft_shape, ranks):
        yield defect(what, "give another engine.tensor_parallel")


def _backends(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    engine, draft = recipe.engine, recipe.draft
    if engine.device == "cpu":
        for key, value in (
            ("engine.attention_backend", engine.attention_backend),
            ("draft.attention_backend", draft.attention_backend),
        ):
            if value not in (None, "torch_native"):
                yield defect(
                    f"{key} is {value} and engine.device cpu, where only torch_native runs",
                    f"leave {key} out",
                )
        if engine.kv_cache_dtype != "auto" or engine.hicache is not None:
            yield defect(
                "engine.kv_cache_dtype or engine.hicache on engine.device cpu, which has neither",
                "leave them out",
            )
        return
    backend = draft.attention_backend
    if backend is not None and backend not in DRAFT_BACKENDS:
        yield defect(
            f"draft.attention_backend is {backend}; expected one of {', '.join(DRAFT_BACKENDS)}",
            "leave it out: the engine takes the target's where that can draft, else flashinfer",
        )
    if backend == "trtllm_mha" and models.draft_shape.get("is_causal") is not True:
        yield warning(
            "draft.attention_backend trtllm_mha serves causal drafters only; the engine takes "
            "another one",
            "set draft.attention_backend=fa4 on Blackwell, fa3 on Hopper",
        )
    if backend == "fa4" and draft.kv_cache_dtype not in (None, "auto", "bfloat16"):
        yield warning(
            f"draft.kv_cache_dtype is {draft.kv_cache_dtype}, but fa4 reads a cache of the "
            "compute dtype only and the engine makes one",
            "leave draft.kv_cache_dtype out",
        )
    if recipe.target.dtype == "float32":
        yield defect(
            "target.dtype is float32; with a drafter the engine fails at the first request, since "
            "it turns the block's embeddings into bfloat16",
            "leave target.dtype out, or set bfloat16",
        )


def _modes(recipe: ServeRecipe, models: Models) -> Iterator[Finding]:
    """Variables: DSpark's files act only where fewer tokens are verified than were drafted."""
    for name in recipe.engine.environment:
        if name.startswith(SIMULATED):
            yield defect(
                f"engine.environment sets {name}, with which the engine makes its figures up",
                "remove it: acceptance is to be measured",
            )
    mode = recipe.engine.environment.get("SGLANG_RAGGED_VERIFY_MODE", "static")
    named = [key for key in ("sts", "sps") if getattr(recipe.draft, key) is not None]
    if named and mode == "static":
        yield warning(
            f"{' and '.join(f'draft.{key}' for key in named)} without effect: "
            "SGLANG_RAGGED_VERIFY_MODE is static, where every draft is verified",
            "set engine.environment={SGLANG_RAGGED_VERIFY_MODE: cap-accept}, or remove them",
        )
    if recipe.draft.algorithm == "dflash" and mode != "static":
        yield warning(f"SGLANG_RAGGED_VERIFY_MODE={mode} has no effect with dflash", "remove it")
