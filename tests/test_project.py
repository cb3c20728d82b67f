"""What a stranger relies on: the README's example runs, the wheel holds the two packages, imports stay light."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("recoverssm_ops", "compile_passes")


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def test_readme_example(tmp_path):
    """In a process of its own, as a reader would run it."""
    example = next(block for block in python_blocks(ROOT / "README.md") if "torch.compile" in block)
    script = tmp_path / "example.py"
    script.write_text(example, encoding="utf-8")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "1 rewritten, 0 refused" in done.stdout


def test_readme_commands():
    """One command for the main job, one for the tests, each with all of its set-up."""
    commands = re.findall(r"^python3 -m venv .*$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [command.split("-m ")[-1].split()[0] for command in commands] == ["models.generate", "pytest"]


def test_wheel_holds_the_two_packages(tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in (*PACKAGES, "models", "tests", "benchmarks", "docs"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "*.safetensors"))
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("recoverssm-*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info" not in name} == set(PACKAGES)
    assert {"recoverssm_ops/py.typed", "compile_passes/py.typed", "recoverssm_ops/triton/verify.py"} <= set(names)


@pytest.mark.parametrize(
    ("package", "forbidden"),
    [
        ("recoverssm_ops", {"compile_passes", "models", "benchmarks", "tests", "triton"}),
        ("compile_passes", {"models", "benchmarks", "tests", "triton"}),
        ("models", {"recoverssm_ops", "benchmarks", "tests"}),
        ("benchmarks", {"tests"}),
    ],
)
def test_dependencies_point_one_way(package, forbidden):
    for path in sorted((ROOT / package).rglob("*.py")):
        if path.parent.name == "triton":
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported = {node.module.split(".")[0]}
            else:
                continue
            assert not imported & forbidden, f"{path.relative_to(ROOT)} imports {imported & forbidden}"


def test_the_model_knows_nothing_of_the_library():
    """Only the main job names the pass; the model and its loop are plain PyTorch."""
    for path in sorted((ROOT / "models").glob("*.py")):
        if path.name != "generate.py":
            assert "recoverssm_ops" not in path.read_text(encoding="utf-8"), path.name
            assert "compile_passes" not in path.read_text(encoding="utf-8"), path.name
