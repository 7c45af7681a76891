"""From a YAML file and `key=value` overrides to a Recipe; every mistake in one line.

An unknown key is an error that names the nearest known one.
"""

import difflib
import json
import re
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ValidationError

from .schema import BOUNDS, DSPARK_DEFAULTS, Recipe, Section

SHIPPED = Path(__file__).parent
AnyRecipe = TypeVar("AnyRecipe", bound=BaseModel)


class StrictLoader(yaml.SafeLoader):
    """A key that occurs twice is a mistake, not a choice of the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        if repeated is not None:
            raise yaml.constructor.ConstructorError(
                None, None, f"key {repeated!r} occurs twice; keep one", node.start_mark
            )
        return super().construct_mapping(node, deep)


# YAML takes a plain 1e-4 for a string; a recipe means the number. What is in quotes stays text.
StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def load_recipe(name: str | Path, overrides: list[str] | None = None) -> Recipe:
    """Read a recipe by path, or by the name of a shipped one, and apply `a.b=value` overrides.

    Raises ValueError in one line a mistake: unknown key (with the nearest), value out of range,
    missing key.
    """
    path = find_recipe(name)
    data = read_mapping(path)
    for override in overrides or []:
        key = set_key(data, override, known_keys())
        _keep_one_bound(data, key)
    _take_shape_of_warm_start(data, overrides or [])
    _fill_dspark(data)
    return validated(Recipe, data, path.name)


def read_mapping(path: Path) -> dict[str, Any]:
    """The sections of a YAML file. Raises ValueError for a file that holds none."""
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), Loader=StrictLoader)  # a SafeLoader
    except UnicodeDecodeError:
        raise ValueError(f"{path}: not text in UTF-8; expected a YAML file") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: no such date
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: expected a mapping of sections, found {type(data).__name__}")
    return data


def validated(model: type[AnyRecipe], data: dict[str, Any], name: str) -> AnyRecipe:
    """The recipe of a schema. Raises ValueError, all its mistakes in one line."""
    try:
        # YAML knows dates and sets; as text they meet the schema's own message.
        text = json.dumps(_with_text_keys(data), default=str)
    except (ValueError, RecursionError):
        raise ValueError(
            f"{name}: a value contains itself, or is nested too deeply; expected sections of keys "
            "and values: write out what stands behind the `*`"
        ) from None
    try:
        return model.model_validate_json(text)
    except ValidationError as error:
        keys = known_keys(model)
        raise ValueError(
            f"{name}: " + "; ".join(_explain(problem, keys) for problem in error.errors())
        ) from None


def find_recipe(name: str | Path, folder: Path = SHIPPED) -> Path:
    """A path as it is, or a shipped recipe of a folder by its name without `.yaml`."""
    path = Path(name)
    if path.is_file():
        return path
    # A version in the name has a dot, too: only `.yaml` is an ending.
    shipped = folder / f"{path.name.removesuffix('.yaml')}.yaml"
    # A clone's documentation says recipes/tiny.yaml; from another folder that means the shipped one
    # as well.
    from_root = folder.relative_to(SHIPPED.parent)
    if path.parent in (Path("."), from_root) and shipped.is_file():
        return shipped
    known = ", ".join(sorted(file.name.removesuffix(".yaml") for file in folder.glob("*.yaml")))
    others = [file.parent for file in SHIPPED.rglob("*.yaml") if file.name == shipped.name]
    verb = "train" if SHIPPED in others else "serve"
    hint = f" (it is a recipe of `spec {verb}`)" if others else ""
    raise ValueError(
        f"no recipe {str(name)!r}{hint}: give the path of a YAML file or one of {known}"
    )


def known_keys(model: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """All dotted keys of the schema."""
    keys: list[str] = []
    for name, field in model.model_fields.items():
        section = _section_of(field.annotation)
        keys.append(prefix + name)
        if section is not None:
            keys += known_keys(section, f"{prefix}{name}.")
    return keys


def _section_of(annotation: Any) -> type[BaseModel] | None:
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            return kind
    return None


def set_key(data: dict[str, Any], override: str, keys: list[str]) -> str:
    """Apply one `a.b=value` and tell the key. Raises ValueError for a key that is not known."""
    key, found, text = override.partition("=")
    if not found or not key:
        shown = key if key in keys else "section.key"
        raise ValueError(f"override {override!r} is not key=value; write {shown}=VALUE")
    if key not in keys:
        raise ValueError(f"unknown key {key!r}{_nearest(key, keys)}")
    *parents, last = key.split(".")
    for parent in parents:
        if not isinstance(data.get(parent), dict):
            data[parent] = {}
        data = data[parent]
    try:
        data[last] = yaml.load(text, Loader=StrictLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise ValueError(f"override {override!r}: {text!r} is not a YAML value") from None
    return key


def _keep_one_bound(data: dict[str, Any], key: str) -> None:
    """A run has one bound: asking for minutes on a recipe that counts steps means minutes."""
    last = key.removeprefix("train.")
    if key in [f"train.{name}" for name in BOUNDS] and data["train"][last] is not None:
        for name in set(BOUNDS) - {last}:
            data["train"].pop(name, None)


def _take_shape_of_warm_start(data: dict[str, Any], overrides: list[str]) -> None:
    """A drafter to start from, asked for beside a recipe: the file's shape gives way to its."""
    given = {override.partition("=")[0] for override in overrides}
    draft = data.get("draft")
    if "draft.init_from" not in given or not isinstance(draft, dict) or not draft["init_from"]:
        return
    for key in [k for k in draft if k != "algorithm" and f"draft.{k}" not in given]:
        del draft[key]


def _fill_dspark(data: dict[str, Any]) -> None:
    """A DSpark recipe's own defaults; a drafter to start from keeps its heads."""
    draft, loss = data.setdefault("draft", {}), data.setdefault("loss", {})
    if not isinstance(draft, dict) or not isinstance(loss, dict):
        return
    if draft.get("algorithm") != "dspark":
        return
    if not draft.get("init_from"):
        bare = draft.get("markov_rank") == 0 or draft.get("confidence_head") is False
        heads = {"confidence_head_with_markov": False} if bare else {}
        _fill(draft, {**DSPARK_DEFAULTS["draft"], **heads})
    terms = {"confidence": 0.0} if draft.get("confidence_head") is False else {}
    _fill(loss, {**DSPARK_DEFAULTS["loss"], **terms})


def _fill(section: dict[str, Any], defaults: dict[str, Any]) -> None:
    for key, value in defaults.items():
        if section.get(key) is None:
            section[key] = value


def _with_text_keys(value: Any) -> Any:
    """Keys as JSON has them: a bare number or date that names something is its text."""
    if isinstance(value, list):
        return [_with_text_keys(item) for item in value]
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return value


def _explain(problem: Any, keys: list[str]) -> str:
    key = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "extra_forbidden":
        return f"unknown key {key!r}{_nearest(key, keys)}"
    if problem["type"] == "missing":
        return f"missing key {key!r}"
    message = problem["msg"].removeprefix("Value error, ")
    named = "." in message.split(" ")[0] or "name" in message  # the message says which key
    return message if not key or (named and not key.count(".")) else f"{key}: {message}"


def _nearest(key: str, keys: list[str]) -> str:
    """A hint at the closest key: same last part elsewhere, or the most alike spelling."""
    last = key.rsplit(".", 1)[-1]
    same = [other for other in keys if other.rsplit(".", 1)[-1] == last]
    close = same or difflib.get_close_matches(key, keys, n=1, cutoff=0.5)
    close = close or difflib.get_close_matches(
        last, [k.rsplit(".", 1)[-1] for k in keys], n=1, cutoff=0.5
    )
    return f"; nearest is {close[0]!r}" if close else ""
