"""The all-layers kernels compiled for CUDA targets on a machine without a GPU."""

import triton.language as tl
from triton_compile import DTYPES, Compiled, compile_kernel

from recoverssm_ops.triton import launch, launch_conv
from recoverssm_ops.triton.layers import commit_layers_kernel, conv_commit_layers_kernel

TYPES = {"fp32": tl.float32, "bf16": tl.bfloat16, "fp16": tl.float16}


def compile_commit(
    arch: int, pool: str, T: int = 8, K: int = 128, V: int = 128, *, columns: int = 1, data: str = "bf16",
    scalar_gate: bool = False, bounded: bool = True, packed: bool = False, layers: int = 20, aligned: int = 0b111111,
) -> Compiled:  # fmt: skip
    """The kernel as the launcher would build it, with the settings of ``triton_compile.compile_commit``."""
    config = launch.commit_config(1024, T, K, V, DTYPES[pool])
    warps = config.pop("num_warps")
    signature, constants = _plan(columns, packed)
    strides = [f"{x}_{axis}" for x in ("u", "k", "g") for axis in ("row", "token", "head")]
    signature |= dict.fromkeys([*strides, "state_slot", "state_head", "state_v"], "i32")
    if scalar_gate:
        signature.pop("g_head")
        constants["g_head"] = 1
    constants |= {
        "LAYERS": layers, "STATE": TYPES[pool], "U": tl.float32, "KEY": TYPES[data], "GATE": TYPES[data],
        "RATE": tl.float32, "BIAS": tl.float32, "ALIGNED": aligned, "H": 8, "HV": 8, "K": K, "V": V, "T": T, "M": columns,
        "LOWER_BOUND": -5.0 if bounded else 0.0, "SCALAR_GATE": scalar_gate, "USE_L2NORM": True, "USE_GATE": True,
        **config,
    }  # fmt: skip
    return compile_kernel(commit_layers_kernel, signature, constants, arch, warps)


def compile_conv_commit(
    arch: int, data: str, T: int = 8, W: int = 4, D: int = 4096, *, state: str = "", columns: int = 1,
    packed: bool = False, layers: int = 20, aligned: int = 0b111111,
) -> Compiled:  # fmt: skip
    config = launch_conv.conv_config(D)
    warps = config.pop("num_warps")
    signature, constants = _plan(columns, packed)
    signature |= dict.fromkeys(("x_row", "x_token", "state_slot"), "i32")
    constants |= {
        "x_channel": 1, "state_channel": W - 1, "state_column": 1, "LAYERS": layers, "STATE": TYPES[state or data],
        "INPUT": TYPES[data], "ALIGNED": aligned, "D": D, "W": W, "T": T, "M": columns, **config,
    }  # fmt: skip
    return compile_kernel(conv_commit_layers_kernel, signature, constants, arch, warps)


def _plan(columns: int, packed: bool) -> tuple[dict[str, str], dict]:
    """Types and constants of the arguments that both kernels share."""
    signature = {"table": "*i64", "source": "*i32", "dest": "*i32", "length": "*i32"}
    signature |= dict.fromkeys(("programs", "num_tokens", "pad_slot_id"), "i32")
    constants = {"cu_seqlens": None, "source_row": 1, "dest_column": 1, "length_column": 1}
    constants |= {"dest_row": columns, "length_row": columns}
    if packed:
        signature["cu_seqlens"] = "*i32"
    return signature, constants
