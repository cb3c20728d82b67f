"""Compile the kernels for CUDA targets on a machine without a GPU: registers, spills, shared memory, PTX."""

import os
import re
import subprocess
import tempfile
from dataclasses import dataclass

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from recoverssm_ops.triton import launch
from recoverssm_ops.triton.commit import commit_kernel
from recoverssm_ops.triton.verify import verify_kernel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Compiled:
    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    ptx: str
    ttgir: str


def _ptxas(arch: int) -> str:
    folder = os.path.join(os.path.dirname(triton.__file__), "backends/nvidia/bin")
    blackwell = os.path.join(folder, "ptxas-blackwell")
    return blackwell if arch >= 100 and os.path.exists(blackwell) else os.path.join(folder, "ptxas")


def compile_kernel(kernel, signature: dict[str, str], constants: dict, arch: int, num_warps: int = 1) -> Compiled:
    """``signature`` gives the types of run-time arguments; every other argument takes its value from ``constants``."""
    types, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        types[name] = signature.get(name, "constexpr")
        # What the launcher sees at run time: aligned pointers, strides that are multiples of 16.
        if name in signature and name not in ("num_tokens", "batch", "pad_slot_id"):
            attributes[(position,)] = [["tt.divisibility", 16]]
    constants = {name: constants[name] for name in kernel.arg_names if name not in signature}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": num_warps})
    ptx = compiled.asm["ptx"]
    target = re.search(r"\.target\s+(\S+)", ptx).group(1).split(",")[0]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "kernel.ptx")
        with open(path, "w") as file:
            file.write(ptx)
        log = subprocess.run(
            [_ptxas(arch), "-v", f"--gpu-name={target}", path, "-o", os.path.join(folder, "kernel.cubin")],
            capture_output=True,
            text=True,
            check=True,
        ).stderr
    registers = int(re.search(r"Used (\d+) registers", log).group(1))
    spilled = sum(map(int, re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", log).groups()))
    return Compiled(registers, spilled, compiled.metadata.shared, num_warps, ptx, compiled.asm["ttgir"])


def compile_verify(
    arch: int, pool: str, T: int = 8, K: int = 128, V: int = 128, *, data: str = "bf16", scalar_gate: bool = False,
    factored: bool = True, packed: bool = False, groups: int = 1, programs: int = 1024,
    **config: int
) -> Compiled:  # fmt: skip
    """The kernel as the launcher would build it; ``config`` overrides its tile sizes, warps and stages."""
    config = launch.verify_config(programs, T, K, V, DTYPES[pool]) | config
    warps = config.pop("num_warps")
    signature = dict.fromkeys(("q", "k", "v", "g", "beta", "o"), f"*{data}")
    signature |= {"state": f"*{pool}", "u": "*fp32", "A_log": "*fp32", "dt_bias": "*fp32", "slots": "*i32"}
    if packed:
        signature["cu_seqlens"] = "*i32"
    constants = {"cu_seqlens": None, "slots_row": 1}
    strides = [f"{x}_{axis}" for x in ("q", "k", "v", "g", "beta") for axis in ("row", "token", "head")]
    strides += ["state_slot", "state_head", "state_v"]
    signature |= dict.fromkeys([*strides, "num_tokens", "batch", "pad_slot_id"], "i32")
    if scalar_gate:
        signature.pop("g_head")
        constants["g_head"] = 1
    signature.pop("beta_head")
    constants |= {
        "beta_head": 1, "H": 8, "HV": 8 * groups, "K": K, "V": V, "T": T, "BLOCK_V": triton.next_power_of_2(V),
        "SCALE": K**-0.5,
        "LOWER_BOUND": -5.0 if factored else 0.0, "SCALAR_GATE": scalar_gate, "FACTORED": factored,
        "SHIFT": launch._shift(-5.0, T) if factored else 0, "USE_L2NORM": True, "USE_GATE": True, "USE_SIGMOID": True,
        "NEG_EIGVAL": False, **config,
    }  # fmt: skip
    return compile_kernel(verify_kernel, signature, constants, arch, warps)


def compile_commit(
    arch: int, pool: str, T: int = 8, K: int = 128, V: int = 128, *, columns: int = 1, data: str = "bf16",
    scalar_gate: bool = False, bounded: bool = True, packed: bool = False, in_place: bool = True, programs: int = 1024,
    **config: int
) -> Compiled:  # fmt: skip
    config = launch.commit_config(programs, T, K, V, DTYPES[pool if in_place else "fp32"]) | config
    warps = config.pop("num_warps")
    signature = {"source_state": f"*{pool}", "dest_state": f"*{pool if in_place else 'fp32'}", "u": "*fp32"}
    signature |= dict.fromkeys(("k", "g"), f"*{data}") | {"A_log": "*fp32", "dt_bias": "*fp32", "length": "*i32"}
    strides = [f"{x}_{axis}" for x in ("u", "k", "g") for axis in ("row", "token", "head")]
    strides += [f"{x}_{axis}" for x in ("source", "dest") for axis in ("slot", "head", "v")]
    signature |= dict.fromkeys([*strides, "num_tokens", "pad_slot_id"], "i32")
    constants = {"cu_seqlens": None, "source": None, "dest": None}
    if in_place:
        signature |= {"source": "*i32", "dest": "*i32"}
    if packed:
        signature["cu_seqlens"] = "*i32"
    if scalar_gate:
        signature.pop("g_head")
        constants["g_head"] = 1
    constants |= {
        "source_row": 1, "dest_row": columns, "dest_column": 1, "length_row": columns, "length_column": 1,
        "H": 8, "HV": 8, "K": K, "V": V, "T": T, "M": columns,
        "LOWER_BOUND": -5.0 if bounded else 0.0, "SCALAR_GATE": scalar_gate,
        "USE_L2NORM": True, "USE_GATE": True, "IN_PLACE": in_place, **config,
    }  # fmt: skip
    return compile_kernel(commit_kernel, signature, constants, arch, warps)
