#!/usr/bin/env bash
# An environment in which SGLang 0.5.23 serves on a CPU, for the tests that start the real engine: install.sh DIR [PYTHON]
# Its python is DIR/bin/python. SGLang never goes into the toolkit's own environment: it pins other packages.
set -euo pipefail
directory=${1:?usage: install.sh DIR [PYTHON]}
python=${2:-python3}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
test -x "$directory/bin/python" || "$python" -m venv "$directory"
pip=("$directory/bin/python" -m pip install --quiet --disable-pip-version-check)
"${pip[@]}" "$(grep "^torch==" "$here/../../constraints.txt")" # the toolkit's own
"${pip[@]}" --no-deps -r "$here/requirements.txt"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cp -r "$here/stand_in" "$scratch/" # a build leaves files beside its source
"${pip[@]}" "$scratch/stand_in"

# torchvision's compiled half wants CUDA and SGLang needs none of it, but its Python half describes two operators of it.
"$directory/bin/python" - <<'PY'
import sysconfig
from pathlib import Path

init = Path(sysconfig.get_paths()["purelib"]) / "torchvision" / "__init__.py"
mark = "# declared for a CPU without the compiled half"
lines = (
    "import torch as _torch",
    '_operators = _torch.library.Library("torchvision", "FRAGMENT")',
    'for _name in ("nms", "qnms"):',
    '    _operators.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")',
)
if mark not in init.read_text():
    init.write_text("\n".join((mark, *lines, init.read_text())))
PY
echo "ready: $directory/bin/python"
