"""Other projects' published kernels, for comparison beside ours; none of their code is part of this project.

    python -m benchmarks.peers .peers       # fetch: downloads two wheels, keeps the few kernel files that are measured

:func:`load` then imports these files from the folder without vLLM or FlashInfer installed: the few modules of vLLM that
they import are stood in for while they load. FlashInfer's kernel also needs ``nvidia-cutlass-dsl`` and ``apache-tvm-ffi``
installed; without them that provider alone is absent.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import subprocess
import sys
import tempfile
import types
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch

VLLM, FLASHINFER = "vllm==0.33.0", "flashinfer-python==0.7.2.post1"
_OPS = "vllm/models/kimi_k3/nvidia/ops/"
FILES = {
    VLLM: {
        f"{_OPS}recoverssm.py": "vllm_recoverssm.py",
        f"{_OPS}third_party/kda/fused_recurrent.py": "vllm_fused_recurrent.py",
    },
    FLASHINFER: {
        f"flashinfer/{name}": f"flashinfer_kda/{name}"
        for name in (
            "kda_kernels/kda_decode_wy_output_only.py",
            "gdn_kernels/gdn_decode_bf16_wy_output_only.py",
            "gdn_kernels/device_target.py",
            "gdn_kernels/dtype_compat.py",
        )
    },
}
HOW_TO_FETCH = "python -m benchmarks.peers"


@dataclass
class Peers:
    """The loaded modules or functions, None where absent, and why: ``{provider: reason}``."""

    vllm: types.ModuleType | None = None
    native: types.ModuleType | None = None
    flashinfer: object | None = None
    absent: dict[str, str] = field(default_factory=dict)


def load(folder: Path) -> Peers:
    """Load what the folder holds; nothing is raised for what it lacks."""
    peers = Peers()
    for provider, attribute, name in (
        ("vllm", "vllm", "vllm_recoverssm.py"),
        ("vllm-native", "native", "vllm_fused_recurrent.py"),
    ):
        try:
            setattr(peers, attribute, _load_file(folder / name))
        except (ImportError, FileNotFoundError) as error:
            peers.absent[provider] = _reason(folder / name, error)
    kernel = "kda_kernels.kda_decode_wy_output_only"
    package = folder / "flashinfer_kda"
    try:
        peers.flashinfer = _load_package(package, kernel).kda_recoverssm_verify
    except (ImportError, FileNotFoundError) as error:
        peers.absent["flashinfer"] = _reason(package, error, "pip install nvidia-cutlass-dsl apache-tvm-ffi")
    return peers


def _reason(path: Path, error: Exception, remedy: str = "") -> str:
    if not path.exists():
        return f"{path} is missing: {HOW_TO_FETCH} {path.parent}"
    return f"{path} does not load ({error})" + (f": {remedy}" if remedy else "")


def _load_file(path: Path) -> types.ModuleType:
    if not path.exists():
        raise FileNotFoundError(path)
    import triton  # an ImportError says that it is missing

    name = f"recoverssm_peer_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses and Triton look their module up by name.
    sys.modules[name] = module
    with _stand_ins(_vllm_modules(triton)):
        spec.loader.exec_module(module)
    return module


def _load_package(folder: Path, module: str) -> types.ModuleType:
    if not folder.exists():
        raise FileNotFoundError(folder)
    name = "recoverssm_peer_flashinfer"
    for package in ("", *sorted({f".{part.parent.name}" for part in folder.glob("*/*.py")})):
        # Packages without their own __init__, which imports all of FlashInfer.
        stand_in = types.ModuleType(name + package)
        stand_in.__path__ = [str(folder / package.lstrip("."))]
        sys.modules[name + package] = stand_in
    return importlib.import_module(f"{name}.{module}")


def _vllm_modules(triton: types.ModuleType) -> dict[str, dict[str, object]]:
    """What the kernel files import from vLLM, and what stands in for it."""
    tl = triton.language
    platform = types.SimpleNamespace(is_arch_support_pdl=lambda: False, is_cuda=torch.cuda.is_available)
    return {
        "vllm.model_executor.layers.mamba.mamba_utils": {"is_conv_state_dim_first": lambda: True},
        "vllm.models.kimi_k3.nvidia.recoverssm.kernels": {"cute_recoverssm_commit": None},
        "vllm.platforms": {"current_platform": platform},
        "vllm.third_party.flash_linear_attention.ops.op": {"exp": tl.exp, "log": tl.log},
        "vllm.triton_utils": {"tl": tl, "triton": triton},
        "vllm.utils.math_utils": {"cdiv": triton.cdiv, "next_power_of_2": triton.next_power_of_2},
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0},
    }


@contextlib.contextmanager
def _stand_ins(modules: dict[str, dict[str, object]]) -> Iterator[None]:
    """The modules as importable, for as long as the context lasts; an installed vLLM comes back afterwards."""
    before = {name: sys.modules.get(name) for name in modules}
    for name, attributes in modules.items():
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(attributes)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def fetch(folder: Path) -> None:
    """Download the wheels with pip, keep :data:`FILES` in the folder."""
    for requirement, files in FILES.items():
        with tempfile.TemporaryDirectory() as wheels:
            pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", "-d", wheels]
            # Linux wheels, whatever this machine is: they are unpacked, not installed.
            platforms = ("manylinux_2_28_x86_64", "manylinux1_x86_64", "any")
            pip += ["--python-version", "3.12", "--implementation", "cp", "--abi", "abi3", "--abi", "none"]
            pip += [f"--platform={platform}" for platform in platforms]
            subprocess.run([*pip, requirement], check=True)
            (wheel,) = Path(wheels).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                for member, name in files.items():
                    (folder / name).parent.mkdir(parents=True, exist_ok=True)
                    (folder / name).write_bytes(archive.read(member))
                    print(folder / name)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description="Fetch the peers' kernel files.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(".peers"))
    fetch(parser.parse_args(argv).folder)


if __name__ == "__main__":
    main()
