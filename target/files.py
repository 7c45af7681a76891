"""From what the user wrote (directory, hub id, GGUF file) to a local directory and a name."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from huggingface_hub import snapshot_download

from .gguf import cached_conversion

HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+)--(?P<repo>[^/]+)/snapshots/[^/]+/?$")


def resolve(path: str | Path, *, need_weights: bool) -> tuple[Path, str]:
    """The local directory of a target and its name (hub id or last component, never absolute).

    Raises ValueError, in one line with the next step, where nothing usable is found.
    """
    local = Path(path).expanduser()
    if local.is_dir():
        _check_directory(local, need_weights=need_weights)
        return local, directory_name(local)
    if local.is_file() and local.suffix == ".gguf":
        return cached_conversion(local), local.stem
    if local.exists():
        raise ValueError(f"{path}: expected a model directory, a hub id or a .gguf file")
    if not HUB_ID.fullmatch(str(path)):
        raise ValueError(
            f"{path}: no such directory; give a model directory, a hub id or a .gguf file"
        )
    return _download(str(path), need_weights=need_weights), str(path)


def directory_name(directory: Path) -> str:
    """The last component, or the hub id where the directory is a hub cache snapshot."""
    resolved = directory.resolve()
    snapshot = SNAPSHOT.search(resolved.as_posix())
    return f"{snapshot['owner']}/{snapshot['repo']}" if snapshot else resolved.name


def weight_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.safetensors"))


def target_revision(directory: Path) -> str:
    """A hash of the config and of every weight file's name, size, header and first weights."""
    digest = hashlib.sha256()
    for path in sorted([directory / "config.json", *weight_files(directory)]):
        if path.is_file():
            with path.open("rb") as file:
                # A header may be longer than what is read; two fine-tunes of one model share it.
                header = int.from_bytes(file.read(8), "little") if path.suffix != ".json" else 0
                file.seek(0)
                start = file.read(max(1 << 16, min(header, 1 << 26) + (1 << 12)))
                digest.update(f"{path.name} {path.stat().st_size}".encode() + start)
    return digest.hexdigest()[:16]


def _check_directory(directory: Path, *, need_weights: bool) -> None:
    if not (directory / "config.json").exists():
        raise ValueError(
            f"{directory}: no config.json; expected a model directory, not a drafter's"
        )
    if need_weights and not weight_files(directory):
        raise ValueError(f"{directory}: no *.safetensors; download or convert the weights into it")


def _download(repo: str, *, need_weights: bool) -> Path:
    patterns = ["*.json", "*.jinja", "*.txt", "*.model", "*.py"]
    if need_weights:
        patterns.append("*.safetensors")
    try:
        directory = Path(snapshot_download(repo, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many unrelated types
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"{repo}: neither a local directory nor reachable on the hub ({type(error).__name__}: "
            f"{reason}); download it elsewhere and give the directory"
        ) from error
    _check_directory(directory, need_weights=need_weights)
    return directory
