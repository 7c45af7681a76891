"""Whether a drafter directory and a target belong together, by the files of both alone."""

from collections.abc import Iterator
from pathlib import Path

from ..dflash.files import read_provenance, stated
from ..dflash.rope import read_rope
from ..target.files import resolve, target_revision
from ..target.inspect import TargetFacts, inspect_target
from ..target.mask_token import free_mask_tokens, suggest_mask_token
from ..target.model import load_tokenizer
from .findings import Finding, Subject, defect, warning

OTHER_TARGET = "give the target it was trained for"


def check_target(s: Subject, target: str) -> Iterator[Finding]:
    """Shape, RoPE, mask token and provenance against the target's config and tokenizer.

    Raises ValueError where there is no readable target.
    """
    facts = inspect_target(target)
    directory, _ = resolve(target, need_weights=False)
    for what, key, has in (
        ("hidden size", "hidden_size", facts.hidden_size),
        ("vocabulary", "vocab_size", facts.embedding_rows),
        ("number of target layers", "num_target_layers", facts.layers),
    ):
        found = s.own.get(key)
        if found is not None and has is not None and found != has:
            yield defect(
                f"the drafter's {what} is {found}, that of {facts.name} is {has}", OTHER_TARGET
            )
    yield from _layers(s, facts)
    yield from _theta(s, facts)
    yield from _mask(s, facts, directory)
    yield from _provenance(s, facts, directory)


def _layers(s: Subject, facts: TargetFacts) -> Iterator[Finding]:
    """Only where the drafter does not state the number itself: else it has been told."""
    ids, count = s.layer_ids, facts.layers
    if s.own.get("num_target_layers") is None and ids and count and max(ids) > count - 2:
        yield defect(
            f"target_layer_ids {ids} go beyond {count - 2}, the last of {facts.name}'s layers that "
            "can be captured",
            OTHER_TARGET,
        )


def _theta(s: Subject, facts: TargetFacts) -> Iterator[Finding]:
    try:
        own = read_rope(s.own, where="config.json").get("rope_theta")
    except (ValueError, TypeError, AttributeError):
        return  # has a finding of its own
    theirs = facts.rope.get("rope_theta")
    if theirs is not None and own != theirs:
        yield warning(
            f"rope_theta is {own}, the target's is {theirs}",
            "fine where it was trained so; a published drafter usually shares the target's",
        )


def _mask(s: Subject, facts: TargetFacts, directory: Path) -> Iterator[Finding]:
    mask, rows = s.whole("mask_token_id"), facts.embedding_rows
    tokenizer = load_tokenizer(directory)
    if mask is None or mask < 0 or rows is None or tokenizer is None:
        return
    if mask >= rows:
        yield defect(
            f"mask_token_id {mask} is no row of the target's embedding ({rows})", OTHER_TARGET
        )
        return
    name = repr(tokenizer.convert_ids_to_tokens(mask))
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    if mask in ends:
        yield defect(
            f"mask_token_id {mask} is {name}, with which texts begin, end or are padded",
            "write the mask token it was trained with; spec inspect TARGET lists free rows",
        )
        return
    free = free_mask_tokens(tokenizer, rows)
    if mask not in free and not (free and mask == suggest_mask_token(tokenizer, rows)):
        yield warning(
            f"mask_token_id {mask} is {name}, which the target's tokenizer uses",
            "train with a free row; spec inspect TARGET lists them",
        )


def _provenance(s: Subject, facts: TargetFacts, directory: Path) -> Iterator[Finding]:
    """spec.json names the target it was trained for, with a hash."""
    record = read_provenance(s.directory)
    name, revision = stated(record, "target", "name"), stated(record, "target", "revision")
    found = target_revision(directory)
    if revision is not None and revision != found:  # not every drafter says
        yield warning(
            f"trained for {name} ({revision}), this target is {facts.name} ({found})", OTHER_TARGET
        )
