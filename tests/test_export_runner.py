"""The C++ runner: the same drafts, and the same text as Python's loop, from a package without Python."""

import random
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from models.decode import decode
from models.drafting import prompt_lookup
from models.persistence import load_model
from models.pools import Pools
from models.prompts import held_out_prompts
from models.runner.export import export_for_runner
from models.speculation import SpeculativeStep

RUNNER = Path(__file__).parents[1] / "models" / "runner"
DRAFTS, TOKENS, MAX_LENGTH = 7, 96, 512


def need(*tools: str) -> None:
    for tool in tools:
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed (cmake is on PyPI; a C++ compiler is your distribution's)")


def test_drafts_equal_the_drafter_of_the_loop(tmp_path):
    need("g++")
    (tmp_path / "drafts.cpp").write_text(
        '#include <iostream>\n#include "prompt_lookup.h"\n'
        "int main() { std::string count, text; while (std::cin >> count >> text)\n"
        'std::cout << prompt_lookup(text == "-" ? "" : text, std::stoul(count)) << "\\n"; }\n'
    )
    program = str(tmp_path / "drafts")
    subprocess.run(["g++", "-std=c++20", "-I", RUNNER, "-o", program, tmp_path / "drafts.cpp"], check=True)
    rng = random.Random(0)
    cases = [(0, "abcabc"), (5, ""), (5, "ab"), (5, "aaaa"), (20, "abcdabcd"), (3, "abcXabcYabc")]
    for _ in range(400):
        alphabet = "abcdef"[: rng.randint(1, 6)]
        cases.append((rng.randint(0, 9), "".join(rng.choices(alphabet, k=rng.randint(1, 60)))))
    given = "".join(f"{count} {text or '-'}\n" for count, text in cases)
    done = subprocess.run([program], input=given, capture_output=True, text=True, check=True)
    expected = [prompt_lookup(text.encode(), count).decode() for count, text in cases]
    assert done.stdout.split("\n")[:-1] == expected
    assert len(set(map(len, expected))) == 10


@pytest.fixture(scope="module")
def runner(tmp_path_factory) -> Path:
    need("cmake", "g++")
    build = tmp_path_factory.mktemp("build")
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    for command in (["cmake", "-S", RUNNER, "-B", build, prefix], ["cmake", "--build", build]):
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    return build / "speculative_runner"


@pytest.fixture(scope="module")
def package(tmp_path_factory) -> Path:
    need("cmake", "g++")
    return export_for_runner(load_model(), tmp_path_factory.mktemp("package"), num_drafts=DRAFTS, max_length=MAX_LENGTH)


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([str(a) for a in arguments], capture_output=True, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("length", [256, 8], ids=["prompt of many windows", "prompt of one window"])
def test_text_equals_the_python_loop(runner, package, length, tmp_path):
    prompts = held_out_prompts(1, length)
    model = load_model()
    step = SpeculativeStep(model, Pools(model.config, 1, MAX_LENGTH))
    expected = decode(step, step.pools, prompts, num_tokens=TOKENS, num_drafts=DRAFTS)
    (tmp_path / "prompt.txt").write_bytes(prompts[0])
    done = run(runner, package, tmp_path / "prompt.txt", TOKENS)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.continuations[0] and len(done.stdout) == TOKENS
    steps = int(done.stderr.split(b" tokens in ")[1].split()[0])
    assert steps < TOKENS  # drafts were accepted


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_text_equals_the_python_loop_on_cuda(runner, tmp_path):
    """The package holds the Triton kernels; the loop in Python runs the model as it is written."""
    model = load_model(device="cuda")
    package = export_for_runner(model, tmp_path, num_drafts=DRAFTS, max_length=MAX_LENGTH)
    for length in (256, 8):
        prompts = held_out_prompts(1, length)
        step = SpeculativeStep(model, Pools(model.config, 1, MAX_LENGTH, device="cuda"))
        expected = decode(step, step.pools, prompts, num_tokens=TOKENS, num_drafts=DRAFTS)
        (tmp_path / "prompt.txt").write_bytes(prompts[0])
        done = run(runner, package, tmp_path / "prompt.txt", TOKENS)
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected.continuations[0] and len(done.stdout) == TOKENS


@pytest.mark.slow
def test_what_does_not_fit_is_said(runner, package, tmp_path):
    prompt = tmp_path / "prompt.txt"
    prompt.write_bytes(b"x" * 450)
    done = run(runner, package, prompt, 96)
    assert done.returncode == 2 and b"need 554 positions, the package's pools hold 512" in done.stderr
    assert run(runner, package, tmp_path / "none.txt", 5).returncode == 2
    assert run(runner, tmp_path / "none.pt2", prompt, 5).returncode == 1
    assert b"TOKENS should be at least 1" in run(runner, package, prompt, 0).stderr
