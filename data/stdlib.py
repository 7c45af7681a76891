"""A prompt source that needs no download: functions of the running interpreter's standard library.

Held-out prompts come from other top-level modules than the training ones (about one module in ten,
by a hash of its name), and code that occurs several times in the library is taken once, so none is
on both sides.
"""

import ast
import hashlib
import os
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from .prompts import Prompt

Split = Literal["train", "heldout"]
KINDS = ("explain", "docstring", "complete", "rewrite", "test", "doc-question")
SKIPPED = {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "site-packages"}
SKIPPED |= {"ensurepip", "encodings", "pydoc_data", "__pycache__", "dist-packages"}
MAX_CHARACTERS = 600  # about 160 tokens
LINES = range(3, 31)

ASKS = {
    "explain": (
        "Explain what this function does:\n\n{code}",
        "Here is a function of the module {module}. Describe step by step how it works.\n\n{code}",
        "What does the following Python code do, and which edge cases does it handle?\n\n{code}",
    ),
    "docstring": (
        "Write a docstring for this function:\n\n{bare}",
        "Add a clear docstring to the following function and return the whole function.\n\n{bare}",
    ),
    "complete": (
        "Complete the body of this Python function:\n\n{head}",
        "Implement the function below so that it does what its docstring says.\n\n{head}",
    ),
    "rewrite": (
        "Add type hints to this function and return the whole function:\n\n{code}",
        "Rewrite this function with type hints and clearer variable names:\n\n{code}",
    ),
    "test": (
        "Write a unit test for this function:\n\n{code}",
        "Write three assert statements that check the following function.\n\n{code}",
    ),
    "doc-question": (
        "The documentation of `{module}.{name}` says:\n\n{doc}\n\nExplain this in your own words.",
        "The documentation of `{module}.{name}` says:\n\n{doc}\n\nGive a short example of its use.",
        "The documentation of `{module}.{name}` says:\n\n{doc}\n\nWhen would someone need this?",
    ),
}


@dataclass(frozen=True)
class Function:
    """A function of the library: dedented source, its parts, and a digest of its code alone."""

    module: str  # dotted
    name: str  # qualified
    code: str
    bare: str  # without docstring
    head: str  # signature and docstring
    doc: str
    digest: str

    @property
    def package(self) -> str:
        return self.module.split(".")[0]


def stdlib_prompts(split: Split, *, seed: int, limit: int | None = None) -> list[Prompt]:
    """Prompts of one split in a fixed order for a seed; the tag is the kind of task.

    Each function comes once before any comes a second time with another task.
    """
    functions = [f for f in library_functions() if split_of(f.package) == split]
    rng = random.Random(f"{split}/{seed}")
    rng.shuffle(functions)
    first = [rng.randrange(len(KINDS)) for _ in functions]
    prompts: list[Prompt] = []
    for turn in range(len(KINDS)):
        for function, start in zip(functions, first, strict=True):
            if limit is not None and len(prompts) == limit:
                return prompts
            prompt = _prompt(function, KINDS[(start + turn) % len(KINDS)])
            if prompt is not None:
                prompts.append(prompt)
    return prompts


def split_of(package: str) -> Split:
    """The side of a top-level module, the same on every machine."""
    return "heldout" if hashlib.sha256(package.encode()).digest()[0] % 10 == 0 else "train"


def _prompt(function: Function, kind: str) -> Prompt | None:
    if kind in ("complete", "doc-question") and not function.doc:
        return None
    id = f"stdlib/{function.module}.{function.name}/{kind}"
    asks = ASKS[kind]
    ask = asks[hashlib.sha256(id.encode()).digest()[0] % len(asks)]
    text = ask.format(
        module=function.module,
        name=function.name,
        code=_fenced(function.code),
        bare=_fenced(function.bare),
        head=_fenced(function.head),
        doc=function.doc,
    )
    return Prompt(id, [{"role": "user", "content": text}], kind)


def _fenced(code: str) -> str:
    return f"```python\n{code}\n```"


@lru_cache(maxsize=1)
def library_functions() -> tuple[Function, ...]:
    """Functions and methods of 3 to 30 lines, at most 600 characters, each code once."""
    root = Path(sysconfig.get_path("stdlib"))
    found: list[Function] = []
    seen: set[str] = set()
    for path, module in _files(root):
        for function in _functions(path, module):
            # The head alone is a prompt too: another body does not make it a new one.
            keys = {f"{function.module}.{function.name}", function.digest, function.head}
            if not keys & seen:
                seen |= keys
                found.append(function)
    return tuple(found)


def _files(root: Path) -> list[tuple[Path, str]]:
    """The library's source files with their dotted module names, in a fixed order."""
    files: list[tuple[Path, str]] = []
    for folder, subfolders, names in os.walk(root):
        # Names that are no identifiers are not importable, such as build configuration.
        subfolders[:] = [n for n in subfolders if n.isidentifier() and n not in SKIPPED]
        for path in (Path(folder, name) for name in names):
            if path.suffix == ".py" and path.stem.isidentifier():
                parts = path.relative_to(root).with_suffix("").parts
                files.append((path, ".".join(parts).removesuffix(".__init__")))
    return sorted(files)


def _functions(path: Path, module: str) -> Iterator[Function]:
    try:
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
    except (SyntaxError, UnicodeDecodeError):
        return  # a template or a file kept for a parser's tests
    lines = source.splitlines()
    stack: list[tuple[ast.AST, str]] = [(tree, "")]
    while stack:
        node, prefix = stack.pop()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                stack.append((child, f"{prefix}{child.name}."))
            elif isinstance(child, (ast.If, ast.Try)):
                stack.append((child, prefix))
            elif isinstance(child, ast.FunctionDef):
                function = _function(child, lines, module, prefix + child.name)
                if function is not None:
                    yield function


def _function(node: ast.FunctionDef, lines: list[str], module: str, name: str) -> Function | None:
    end = node.end_lineno
    assert end is not None
    body = lines[node.lineno - 1 : end]
    code = textwrap.dedent("\n".join(body))
    if len(body) not in LINES or len(code) > MAX_CHARACTERS or not code.startswith("def "):
        return None
    doc = ast.get_docstring(node) or ""
    statements = node.body[1:] if doc else node.body
    if not statements or statements[0].lineno == node.lineno:
        return None
    head, bare = code, code
    if doc:
        opening, closing = node.body[0].lineno - node.lineno, node.body[0].end_lineno
        assert closing is not None
        dedented = code.split("\n")
        head = "\n".join(dedented[: closing - node.lineno + 1])
        bare = "\n".join(dedented[:opening] + dedented[closing - node.lineno + 1 :])
    # Neither the name, the docstring nor the layout makes a function another one.
    shape = " ".join(bare.removeprefix(f"def {node.name}").split())
    digest = hashlib.sha256(shape.encode()).hexdigest()
    return Function(module, name, code, bare, head, doc, digest)
