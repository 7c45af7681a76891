"""What a YAML file says and how it is read: text in quotes stays text, a broken file has a name."""

from pathlib import Path

import pytest

from spec.recipes.load import load_recipe, read_mapping, set_key

MINIMAL = "out: runs/x\ntarget: {path: model}\ndata: {rows: [rows.jsonl]}\ntrain: {steps: 5}\n"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("6E5", 6e5),
        ("-.5e3", -500.0),
        ("1.5e3", 1500.0),
        ("0.1", 0.1),
        ("7", 7),
        ("'1e-4'", "1e-4"),
        ('"2024"', "2024"),
        ("1e-4x", "1e-4x"),
        ("e5", "e5"),
        ("1-2", "1-2"),
    ],
)
def test_plain_numbers_and_quoted_text(text: str, value: object, tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(f"a: {text}\n")
    data = read_mapping(path)
    set_key(data, f"b={text}", ["b"])
    assert data == {"a": value, "b": value} and type(data["a"]) is type(value)


def test_a_name_of_digits(tmp_path: Path) -> None:
    path = tmp_path / "own.yaml"
    path.write_text(
        MINIMAL.replace("model", "'2024'").replace("{steps: 5}", "{steps: 5, lr: 1e-4}")
    )
    recipe = load_recipe(path)
    assert (recipe.target.path, recipe.train.lr) == ("2024", 1e-4)
    assert load_recipe(path, ["target.path='7.5'"]).target.path == "7.5"
    with pytest.raises(ValueError, match=r"target\.path: Input should be a valid string"):
        load_recipe(path, ["target.path=7"])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"\x80\x02binary\xff", "not text in UTF-8; expected a YAML file"),
        (b"out: 2024-13-45\n", "not valid YAML: month must be in 1..12"),
        (b"a: &a [*a]\n", "a value contains itself"),
        (b"a: &a {b: *a}\n", "a value contains itself"),
        (b"a: " + b"[" * 2000 + b"]" * 2000, "not valid YAML: maximum recursion depth"),
    ],
)
def test_a_broken_file_has_its_name_in_one_line(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.yaml"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"broken\.yaml: ") as error:
        load_recipe(path)
    assert words in str(error.value) and "\n" not in str(error.value)


def test_an_override_that_is_no_date() -> None:
    with pytest.raises(ValueError, match="override 'out=2024-13-45': .* is not a YAML value"):
        load_recipe("tiny", ["out=2024-13-45"])
