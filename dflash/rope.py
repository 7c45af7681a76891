"""The RoPE of a drafter's config.json, in one spelling; whatever says two things is refused."""

from typing import Any

# Keys of each kind, beside those of every kind, as transformers 5 has them.
ROPE_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (
        *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast"),
        *("beta_slow", "mscale", "mscale_all_dim", "truncate"),
    ),
    "longrope": (
        *("short_factor", "long_factor", "original_max_position_embeddings"),
        *("attention_factor", "factor"),
    ),
    "llama3": (
        *("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    ),
}
EVERY_KIND = ("rope_type", "rope_theta", "partial_rotary_factor")
BESIDE = ("partial_rotary_factor", "original_max_position_embeddings")  # may stand at the top


def read_rope(data: dict[str, Any], *, where: str) -> dict[str, Any]:
    """The RoPE of a config.

    `rope_parameters`, or flat `rope_theta` with optional `rope_scaling`, never both at odds; its
    kind is called `rope_type`, or `type` as in older files. Raises ValueError.
    """
    for key in ("rope_parameters", "rope_scaling"):
        if not isinstance(data.get(key), dict | None):
            raise ValueError(f"{where}: {key} is {data[key]!r}, expected an object")
    nested, flat = data.get("rope_parameters"), data.get("rope_theta")
    name = "rope_scaling" if nested is None else "rope_parameters"
    if nested is None and flat is None:
        raise ValueError(f"{where} states no RoPE: write rope_parameters (rope_theta, rope_type)")
    if nested is not None and data.get("rope_scaling"):
        raise ValueError(f"{where}: rope_scaling beside rope_parameters; keep rope_parameters")
    inner = dict(data.get(name) or {})
    if flat is not None and flat != inner.get("rope_theta", flat):
        raise ValueError(
            f"{where}: rope_theta is {flat} but {name} says {inner['rope_theta']}; keep the one "
            "trained with"
        )
    kinds = [inner.pop(key) for key in ("rope_type", "type") if key in inner]
    if any(kind != kinds[0] for kind in kinds):
        raise ValueError(
            f"{where}: {name} names {kinds} as rope_type and type; keep the one trained with"
        )
    rope = {"rope_type": kinds[0] if kinds else "default", "rope_theta": flat, **inner}
    for key in BESIDE:
        top = data.get(key)
        if top is None or key not in _keys_of(rope):
            continue
        if rope.setdefault(key, top) != top:
            raise ValueError(
                f"{where}: {key} is {top} at the top and {rope[key]} in {name}; keep the one "
                "trained with"
            )
    try:
        refuse_foreign_keys(rope)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    return rope


def check_rope_parameters(rope: dict[str, Any]) -> None:
    """ValueError for a RoPE that is not stated in full, or that engines do not apply."""
    theta = rope.get("rope_theta")
    if theta is not None and (not isinstance(theta, float | int) or theta <= 0):
        raise ValueError(f"rope_theta is {theta!r}, expected a number above 0")
    if theta is None or rope.get("rope_type") not in tuple(ROPE_KEYS):
        raise ValueError(
            f"rope_parameters {rope} need a rope_theta and a rope_type of {', '.join(ROPE_KEYS)}"
        )
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(
            f"partial_rotary_factor {rope['partial_rotary_factor']}: engines rotate a drafter's "
            "whole head, so such a drafter would be served wrongly"
        )
    refuse_foreign_keys(rope)


def refuse_foreign_keys(rope: dict[str, Any]) -> None:
    """ValueError for a key that its rope_type does not have: one of the two is a slip."""
    known = _keys_of(rope)
    foreign = [key for key, value in rope.items() if value is not None and key not in known]
    if foreign and known:
        raise ValueError(
            f"RoPE of rope_type {rope['rope_type']!r} has no {', '.join(foreign)}; write the "
            "rope_type it was trained with, or take the key out"
        )


def _keys_of(rope: dict[str, Any]) -> tuple[str, ...]:
    """All keys that a RoPE of this kind may have; none for a kind that does not exist."""
    kind = rope["rope_type"]
    return (*EVERY_KIND, *ROPE_KEYS[kind]) if isinstance(kind, str) and kind in ROPE_KEYS else ()
