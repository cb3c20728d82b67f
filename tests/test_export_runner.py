"""The C++ runner, exported for and built as docs/export.md says: the same drafts and the same text as Python's loop."""

import random
import re
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest
import torch
from test_pass_model import speculative_step

from models.decode import decode
from models.drafting import prompt_lookup
from models.persistence import load_model
from models.pools import Pools
from models.prompts import held_out_prompts
from models.runner.export import export_for_runner
from models.speculation import SpeculativeStep

ROOT = Path(__file__).parents[1]
RUNNER = ROOT / "models" / "runner"
DRAFTS, TOKENS, MAX_LENGTH = 7, 96, 1024  # as in the page's commands
(COMMANDS,) = re.findall(r"```bash\nOUT=build\n(.*?)```", (ROOT / "docs" / "export.md").read_text("utf-8"), re.DOTALL)


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
def out(tmp_path_factory) -> Path:
    need("cmake", "g++")
    return tmp_path_factory.mktemp("out")


def run_commands(wanted, out: Path) -> subprocess.CompletedProcess:
    """Those of the page's commands that ``wanted`` says, with ``out`` as its directory."""
    lines = [line for line in COMMANDS.splitlines() if wanted(line)]
    script = "\n".join(lines).replace("python ", f"{sys.executable} ")
    done = subprocess.run(["bash", "-euc", f"OUT={out}\n{script}"], capture_output=True, cwd=ROOT)
    assert lines and done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def runner(out) -> Path:
    run_commands(lambda line: line.startswith("cmake"), out)
    return out / "runner" / "speculative_runner"


@pytest.fixture(scope="module")
def package(out) -> Path:
    run_commands(lambda line: line.startswith("python"), out)
    return out / "step" / "step.aoti.pt2"


def run(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run([str(a) for a in arguments], capture_output=True, timeout=300)


@pytest.mark.slow
def test_the_whole_step(runner, package, out, tmp_path):
    done = run_commands(lambda line: not line.startswith(("cmake", "python")), out)
    assert b"self." in done.stdout and b" tokens in " in done.stderr
    model, prompt = load_model(), tmp_path / "prompt.txt"
    for length in (256, 8):  # many windows of prompt, and one
        prompts = held_out_prompts(1, length)
        step = SpeculativeStep(model, Pools(model.config, 1, MAX_LENGTH))
        expected = decode(step, step.pools, prompts, num_tokens=TOKENS, num_drafts=DRAFTS)
        prompt.write_bytes(prompts[0])
        done = run(runner, package, prompt, TOKENS)
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected.continuations[0] and len(done.stdout) == TOKENS
        steps = int(done.stderr.split(b" tokens in ")[1].split()[0])
        assert steps < TOKENS  # drafts were accepted

    prompt.write_bytes(b"x" * 1000)
    done = run(runner, package, prompt, 96)
    assert done.returncode == 2 and b"need 1104 positions, the package's pools hold 1024" in done.stderr
    assert run(runner, package, tmp_path / "none.txt", 5).returncode == 2
    assert run(runner, tmp_path / "none.pt2", prompt, 5).returncode == 1
    assert b"TOKENS should be at least 1" in run(runner, package, prompt, 0).stderr


@pytest.mark.cuda
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_text_equals_the_python_loop_on_cuda(runner, tmp_path):
    """The package holds the Triton kernels; the loop in Python runs the model as it is written."""
    model = load_model(device="cuda")
    whole = export_for_runner(model, tmp_path / "step", num_drafts=DRAFTS, max_length=MAX_LENGTH)
    halves = export_for_runner(model, tmp_path / "halves", num_drafts=DRAFTS, max_length=MAX_LENGTH, halves=True)
    for length, packages in product((256, 8), (whole, halves)):
        prompts = held_out_prompts(1, length)
        step = SpeculativeStep(model, Pools(model.config, 1, MAX_LENGTH, device="cuda"))
        expected = decode(step, step.pools, prompts, num_tokens=TOKENS, num_drafts=DRAFTS)
        (tmp_path / "prompt.txt").write_bytes(prompts[0])
        done = run(runner, *packages, tmp_path / "prompt.txt", TOKENS)
        assert done.returncode == 0, done.stderr
        assert done.stdout == expected.continuations[0] and len(done.stdout) == TOKENS


@pytest.mark.slow
def test_the_halves_decode_the_same_text(runner, tmp_path):
    """Two packages, between which the runner carries what verify hands to commit; the pools are the runner's."""
    model = speculative_step(num_layers=2, full_attn_period=2).model
    sizes = {"num_drafts": 3, "max_length": 128}
    verify, commit = export_for_runner(model, tmp_path, halves=True, **sizes)
    step = SpeculativeStep(model, Pools(model.config, 1, sizes["max_length"]))
    prompt = b"abcabcabcab"
    expected = decode(step, step.pools, [prompt], num_tokens=48, num_drafts=sizes["num_drafts"])
    (tmp_path / "prompt.txt").write_bytes(prompt)
    done = run(runner, verify, commit, tmp_path / "prompt.txt", 48)
    assert done.returncode == 0, done.stderr
    assert done.stdout == expected.continuations[0] and len(set(done.stdout)) > 1
    done = run(runner, commit, verify, tmp_path / "prompt.txt", 48)
    assert done.returncode == 1 and b"holds the program 'commit'" in done.stderr
    done = run(runner, verify, tmp_path / "prompt.txt", 48)
    assert done.returncode == 1 and b"one package: the whole step; two: verify, then commit" in done.stderr
