"""When sts.json is worth writing, and what it is tied to."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from spec.eval.sts import difference_from_fit, edge_slots, objection, weights_digest, write_sts
from spec.target.sampling import Sampling


def calibration(**changes: Any) -> dict[str, Any]:
    return {
        "temperatures": [1.0, 2.0],
        "fit": {"num_rounds": 500},
        "ece_before": [0.10, 0.20],
        "ece_after": [0.12, 0.18],  # one slot worse, the mean the same
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 20,
        "draft_weights": None,
        **changes,
    }


def test_too_few_rounds_or_a_greater_error_are_objected_to() -> None:
    assert objection(calibration()) is None
    few = objection(calibration(fit={"num_rounds": 499}))
    assert few is not None and few.startswith("499 rounds to fit on, expected at least 500")
    worse = objection(calibration(ece_after=[0.12, 0.19]))
    assert worse is not None and "rose from 0.1500 to 0.1550" in worse


def test_temperatures_at_an_end_of_the_grid() -> None:
    assert edge_slots([0.1, 1.0, 10.0, 0.1122, 8.91]) == [1, 3]


def test_the_digest_is_of_the_tensors_not_of_their_files(tmp_path: Path) -> None:
    def digest(name: str, *files: dict[str, torch.Tensor]) -> str:
        directory = tmp_path / name
        directory.mkdir()
        for i, tensors in enumerate(files):
            save_file(tensors, directory / f"model-{i}.safetensors", metadata={"of": name})
        return weights_digest(directory)

    a, b = torch.arange(6.0).reshape(2, 3), torch.tensor([1.5], dtype=torch.bfloat16)
    whole = digest("whole", {"a": a, "b": b})
    assert digest("sharded", {"b": b}, {"a": a}) == whole
    touched = a.clone()
    touched[1, 2] += 1e-5
    others = [
        digest("touched", {"a": touched, "b": b}),
        digest("renamed", {"a": a, "c": b}),
        digest("swapped", {"b": a, "a": b}),
        digest("reshaped", {"a": a.reshape(3, 2), "b": b}),
        digest("cast", {"a": a, "b": b.float()}),
        digest("fewer", {"a": a}),
    ]
    assert len({whole, *others}) == 7


def test_another_sampling_or_other_weights_are_told(tmp_path: Path) -> None:
    fitted = Sampling(0.7, 0.9, 20)
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    write_sts(calibration(draft_weights=weights_digest(tmp_path)), tmp_path, dataset="code")
    assert difference_from_fit(tmp_path, fitted) is None
    assert difference_from_fit(tmp_path, Sampling(0.7, 0.9, 20, seed=3)) is None
    assert difference_from_fit(tmp_path, Sampling()) == (
        "temperature is 0, fitted at 0.7; top_p is 1, fitted at 0.9; top_k is 0, fitted at 20"
    )
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    assert difference_from_fit(tmp_path, fitted) == "the drafter's weights have changed since"
    # Files of others do not say what they were fitted on.
    (tmp_path / "sts.json").write_text(json.dumps({"temperatures": [1.0]}))
    assert difference_from_fit(tmp_path, Sampling()) is None
