"""Kernels that Triton compiled for a GPU, run on the CPU: an emulator of the PTX instructions that this project's kernels have.

Triton's interpreter takes neither Gluon nor bf16. Here the compiler's own output runs: layouts, swizzled shared memory, matrix
fragments, masks, copies on their way. All threads of a block advance together, an array over the threads for each register.

What it sees, naming the statement and the line of the kernel that it comes from (:class:`PTXError`):

- instructions that it does not know, and registers that nobody has written;
- accesses outside of the tensors that a launch was given, and misaligned ones;
- shared memory that is read before it is written, or whose copy (``cp.async``) has not been waited for;
- threads of one statement that store different values in the same place;
- shared memory that two warps access, one of them to change it, without a barrier between.

What it is not:

- PTX is not what a GPU runs: ptxas chooses registers and order, and may fuse what PTX lets it fuse.
- ``mma`` adds exact products in float64 and rounds once; a matrix unit truncates as it accumulates. The ``approx`` functions
  are rounded correctly, ``fma`` rounds through float64.
- The programs of a grid run one after another, and the lanes of a warp in lockstep: races among either are not seen.
- A wild address that hits another of the launch's tensors is not seen.
- Nothing here takes time: no figure of a GPU's speed follows.
"""

from ptx_emulator.errors import PTXError
from ptx_emulator.machine import Machine
from ptx_emulator.memory import GlobalMemory
from ptx_emulator.program import Program

__all__ = ["GlobalMemory", "Machine", "PTXError", "Program"]
