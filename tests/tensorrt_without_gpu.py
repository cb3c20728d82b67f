"""Import ``torch_tensorrt`` on a machine without a GPU, for lowering and partitioning. Nothing of it can run an engine here.

Only for a process of its own: it replaces functions of ``torch.cuda``.
"""

import os

import torch


def import_torch_tensorrt():
    if not torch.cuda.is_available():
        # Asked for at import, and when a compilation starts.
        torch.cuda.get_device_capability = lambda *args, **kwargs: (9, 0)
        torch.cuda.current_device = lambda: 0
        torch.cuda.mem_get_info = lambda *args, **kwargs: (8 << 30, 16 << 30)
        if torch.version.cuda is None:
            # Its native runtime is linked to libtorch_cuda, and an annotation names a class of CUDA builds.
            if not hasattr(torch._C, "_CudaDeviceProperties"):
                torch._C._CudaDeviceProperties = type("_CudaDeviceProperties", (), {})
            is_file = os.path.isfile
            os.path.isfile = lambda path: not str(path).endswith(_NATIVE) and is_file(path)
    import torch_tensorrt

    if not torch.cuda.is_available():
        # A dry run moves what is left to PyTorch to the GPU.
        torch_tensorrt.Device.to = lambda self, other: torch.device("cpu")
    return torch_tensorrt


_NATIVE = ("libtorchtrt.so", "libtorchtrt_runtime.so")
