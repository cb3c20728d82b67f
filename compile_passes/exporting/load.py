"""Load a saved step, and hold it and its inputs to the manifest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from compile_passes.exporting.manifest import Manifest, ManifestError, dtype_name


class Program:
    """One loaded program: call it with the tensors that ``inputs`` lists, in order, and get a tuple as ``outputs`` lists.

    Raises:
        ManifestError: another number of tensors, another dtype, device or size than the manifest says, by the input's name.
    """

    def __init__(self, name: str, described: dict, manifest: Manifest, call: Callable):
        self.name, self.manifest, self._call = name, manifest, call
        self.inputs, self.outputs, self._owned = (described[kind] for kind in ("inputs", "outputs", "buffers"))

    def __call__(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        self._check(tensors)
        results = self._call(*tensors)
        return tuple(results) if isinstance(results, (list, tuple)) else (results,)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The pools that the program owns, by name; of an exported program alone, a package keeps its own."""
        if not isinstance(self._call, nn.Module):
            return {}
        return {port["name"]: self._call.get_buffer(port["name"]) for port in self._owned}

    def _check(self, tensors: tuple[Tensor, ...]) -> None:
        names = ", ".join(port["name"] for port in self.inputs)
        if len(tensors) != len(self.inputs):
            raise ManifestError(f"{self.name} takes {len(self.inputs)} tensors ({names}), but got {len(tensors)}")
        sizes: dict[str, int] = {}
        for port, x in zip(self.inputs, tensors, strict=True):
            what = f"{self.name}: {port['name']} should"
            if not isinstance(x, Tensor):
                raise ManifestError(f"{what} be a tensor, but was {type(x).__name__}")
            if dtype_name(x.dtype) != port["dtype"]:
                raise ManifestError(f"{what} have dtype {port['dtype']}, but had {dtype_name(x.dtype)}")
            if x.device.type != self.manifest.device:
                raise ManifestError(f"{what} be on {self.manifest.device}, but was on {x.device}")
            if len(port["shape"]) != x.ndim or not all(
                self._fits(size, n, sizes) for size, n in zip(port["shape"], x.shape, strict=True)
            ):
                known = ", ".join(
                    f"{name} in {self.manifest.dims[name]}" for name in port["shape"] if name in self.manifest.dims
                )
                raise ManifestError(
                    f"{what} have shape {port['shape']}{known and f' ({known})'}, but had {list(x.shape)}"
                )

    def _fits(self, size: int | str, n: int, sizes: dict[str, int]) -> bool:
        if isinstance(size, int):
            return size == n
        low, high = self.manifest.dims.get(size, [None, None])
        # A size that is no single name is for the program's own guards to judge.
        return sizes.setdefault(size, n) == n and (low is None or n >= low) and (high is None or n <= high)


class LoadedStep:
    """``manifest`` and the programs that are there: ``step``, ``verify``, ``commit``."""

    def __init__(self, manifest: Manifest, programs: dict[str, Program]):
        self.manifest, self.programs = manifest, programs

    def __getattr__(self, name: str) -> Program:
        programs = self.__dict__.get("programs", {})
        if name in programs:
            return programs[name]
        if name in ("step", "verify", "commit"):
            raise ManifestError(f"no {name} was loaded: {self.manifest.uncut or 'no package of it was compiled'}")
        raise AttributeError(name)


def load_step(
    directory: str | Path,
    *,
    window: int | None = None,
    dtype: torch.dtype | None = None,
    state_dtype: torch.dtype | None = None,
    aot_inductor: bool = False,
    run_single_threaded: bool = False,
) -> LoadedStep:
    """Load what :meth:`ExportedStep.save` wrote.

    Args:
        window: tokens of a window that the caller will use; checked.
        dtype: of the activations (v); checked. state_dtype: of the recurrent state pools; checked.
        aot_inductor: load the compiled packages in place of the exported programs.
        run_single_threaded: of a package, as in ``aoti_load_package``; a CUDA graph around it needs it.

    Raises:
        FileNotFoundError: no manifest, or a file that it names is missing.
        ManifestError: another torch release (major.minor), window or dtype than the manifest says.
    """
    directory = Path(directory)
    manifest = Manifest.read(directory)
    made, here = manifest.versions["torch"], torch.__version__
    if _release(made) != _release(here):
        raise ManifestError(f"{directory} was exported with torch {made}, but this is torch {here}: export it again")
    if window is not None and window != manifest.window:
        raise ManifestError(
            f"{directory} was exported for windows of {manifest.window} tokens, but {window} were asked for"
        )
    for key, wanted in (("dtype", dtype), ("state_dtype", state_dtype)):
        found = sorted({layer[key] for layer in manifest.layers})
        if wanted is not None and found != [dtype_name(wanted)]:
            raise ManifestError(
                f"{directory} was exported with {key} {', '.join(found)}, but {dtype_name(wanted)} was asked for"
            )
    programs = {}
    for name, described in manifest.programs.items():
        file = described["package"] if aot_inductor else described["file"]
        if file is None:
            continue
        path = directory / file
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, though the manifest names it")
        if aot_inductor:
            call = torch._inductor.aoti_load_package(str(path), run_single_threaded=run_single_threaded)
        else:
            call = torch.export.load(path).module()
        programs[name] = Program(name, described, manifest, call)
    if not programs:
        if aot_inductor:
            raise ManifestError(f"{directory} holds no AOTInductor package: save it with aot_inductor=('step',)")
        raise ManifestError(f"{directory} holds packages alone: load it with aot_inductor=True")
    return LoadedStep(manifest, programs)


def _release(version: str) -> list[str]:
    return version.split("+")[0].split(".")[:2]
