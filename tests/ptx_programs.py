"""Little programs in PTX for the tests of the emulator, and how they are run."""

import torch
from ptx_emulator import GlobalMemory, Machine, Program

LANES = torch.arange(32, dtype=torch.int32)


def run(body: str, *tensors: torch.Tensor, threads: int = 32, shared: int = 0) -> None:
    """A kernel of one block. The address of ``tensors[i]`` is in ``%rd{i}``, the thread's number in ``%r0``."""
    names = [f"kernel_param_{i}" for i in range(len(tensors))]
    loads = "".join(f"ld.param.b64 %rd{i}, [{name}];\n" for i, name in enumerate(names))
    ptx = f""".visible .entry kernel({", ".join(f".param .u64 {name}" for name in names)})
    .reqntid {threads}
    {{
    .reg .pred %p<9>; .reg .b16 %rs<20>; .reg .b32 %r<40>; .reg .b64 %rd<20>;
    {loads} mov.u32 %r0, %tid.x;
    {body}
    ret;
    }}"""
    Machine(Program.parse(ptx), shared).run(1, [x.data_ptr() for x in tensors], GlobalMemory(tensors))


def mine(tensor: int, register: str = "%rd9") -> str:
    """``register``: the address of the thread's own 32-bit element of a tensor."""
    return f"mad.wide.u32 {register}, %r0, 4, %rd{tensor};\n"


def shared_address(register: str = "%r9", scale: int = 4) -> str:
    return f"mov.b32 %r8, global_smem; mad.lo.s32 {register}, %r0, {scale}, %r8;\n"
