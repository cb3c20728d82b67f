"""The Python examples of docs/export.md, each in a process of its own, as a reader would run it (its commands:
test_export_runner.py)."""

import importlib.util
import re
import shutil
from pathlib import Path

import pytest
from test_ops_export import fresh_process

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
SETUP, *EXAMPLES = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
NAMES = ("torch.export", "halves", "AOTInductor", "ONNX", "Torch-TensorRT")
NEEDS = {"ONNX": ("onnx", "onnxscript", "onnxruntime"), "Torch-TensorRT": ("torch_tensorrt",)}
WITHOUT_GPU = f"""
import functools, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from tensorrt_without_gpu import import_torch_tensorrt
torch_tensorrt = import_torch_tensorrt()
torch_tensorrt.dynamo.compile = functools.partial(torch_tensorrt.dynamo.compile, dryrun=True)
"""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "AOTInductor" else name for name in NAMES]
)
def test_example(name, tmp_path):
    for package in NEEDS.get(name, ()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    if name == "AOTInductor" and shutil.which("g++") is None:
        pytest.skip("AOTInductor compiles C++, and g++ is not installed")
    assert len(EXAMPLES) == len(NAMES)
    prefix = WITHOUT_GPU if name == "Torch-TensorRT" else ""
    code = f"import os; os.chdir({str(tmp_path)!r})\n{prefix}{SETUP}{EXAMPLES[NAMES.index(name)]}print('done')"
    result = fresh_process(code)
    assert result.returncode == 0 and result.stdout.splitlines()[-1] == "done", result.stderr
    if name == "torch.export":
        assert "1 rewritten, 0 refused" in result.stdout
