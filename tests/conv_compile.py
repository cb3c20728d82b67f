"""The convolution's kernels compiled for CUDA targets on a machine without a GPU."""

from triton_compile import Compiled, compile_kernel

from recoverssm_ops.triton import launch_conv
from recoverssm_ops.triton.conv import conv_commit_kernel, conv_verify_kernel


def compile_verify(
    arch: int, data: str, T: int = 8, W: int = 4, D: int = 4096, *, state: str = "", weight: str = "", bias: bool = False,
    packed: bool = False, silu: bool = True, pool: str = "dense",
) -> Compiled:  # fmt: skip
    """The kernel as the launcher would build it."""
    signature = {"x": f"*{data}", "y": f"*{data}", "weight": f"*{weight or data}", "state": f"*{state or data}"}
    signature |= {"slots": "*i32"} | dict.fromkeys(("num_tokens", "batch", "pad_slot_id"), "i32")
    constants = {"bias": None, "bias_channel": 0, "cu_seqlens": None, "slots_row": 1}
    if bias:
        signature["bias"] = f"*{weight or data}"
        constants["bias_channel"] = 1
    if packed:
        signature["cu_seqlens"] = "*i32"
    constants |= {"weight_channel": W, "weight_tap": 1} | _layout(W, signature, pool)
    return _compile(conv_verify_kernel, signature, constants | {"D": D, "W": W, "T": T, "SILU": silu}, arch)


def compile_commit(
    arch: int, data: str, T: int = 8, W: int = 4, D: int = 4096, *, state: str = "", columns: int = 1,
    packed: bool = False, pool: str = "dense",
) -> Compiled:  # fmt: skip
    signature = {"x": f"*{data}", "state": f"*{state or data}"}
    signature |= dict.fromkeys(("source", "dest", "length"), "*i32") | dict.fromkeys(
        ("num_tokens", "pad_slot_id"), "i32"
    )
    constants = {"cu_seqlens": None, "source_row": 1}
    for plan in ("dest", "length"):
        constants |= {f"{plan}_row": columns, f"{plan}_column": 1}
    if packed:
        signature["cu_seqlens"] = "*i32"
    constants |= _layout(W, signature, pool) | {"D": D, "W": W, "T": T, "M": columns}
    return _compile(conv_commit_kernel, signature, constants, arch)


def _layout(W: int, signature: dict[str, str], pool: str) -> dict[str, int]:
    """Strides; x has its channels innermost. ``pool``: "dense" ``[slots, D, W-1]``, "channels innermost" or "strided"."""
    signature |= dict.fromkeys(("x_row", "x_token", "state_slot"), "i32")
    if pool != "dense":
        signature["state_column"] = "i32"
    if pool == "strided":
        signature["state_channel"] = "i32"
    return {"x_channel": 1, "state_channel": W - 1 if pool == "dense" else 1, "state_column": 1}


def _compile(kernel, signature: dict[str, str], constants: dict, arch: int) -> Compiled:
    config = launch_conv.conv_config(constants["D"])
    warps = config.pop("num_warps")
    return compile_kernel(kernel, signature, constants | config, arch, warps)
