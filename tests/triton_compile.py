"""Kernels compiled for CUDA targets on a machine without a GPU, as the launchers would: see ``benchmarks.compilation``."""

import functools

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import kernel_variants
from benchmarks.compilation import Compiled, compile_launch, compile_source, only_launch


def compile_with(build, arch: int, *arguments, **settings) -> Compiled:
    """``build`` is one of the functions of ``benchmarks.kernel_variants``."""
    return compile_launch(only_launch(build(*arguments, **settings)), arch)


def compiler(build):
    return functools.partial(compile_with, build)


compile_verify = compiler(kernel_variants.verify)
compile_commit = compiler(kernel_variants.commit)


def compile_kernel(kernel, signature: dict[str, str], arch: int) -> Compiled:
    """A kernel by itself; ``signature`` gives the types of all its arguments."""
    return compile_source(ASTSource(kernel, signature, {}, {}), GPUTarget("cuda", arch, 32), {})
