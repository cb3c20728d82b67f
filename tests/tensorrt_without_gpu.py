"""``torch_tensorrt`` on a machine without a GPU, for lowering, partitioning and building. No engine runs here.

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
        torch.cuda.synchronize = lambda *args, **kwargs: None
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


def build_engines_only():
    """From here on ``torch_tensorrt.dynamo.compile`` returns a serialized engine, which TensorRT-RTX builds without a GPU.

    Kernels for the machine's GPU are compiled when an engine is loaded: what fails there does not fail here.
    """
    torch_tensorrt = import_torch_tensorrt()
    import tensorrt

    class Loaded:
        """In place of the engine that Torch-TensorRT loads only to serialize it again."""

        def __init__(self, serialized):
            self.serialized = serialized

        def serialize(self):
            return self.serialized

    class Runtime:
        def __init__(self, logger):
            pass

        def deserialize_cuda_engine(self, serialized):
            return None if serialized is None else Loaded(serialized)

    tensorrt.Runtime = Runtime
    torch_tensorrt.dynamo.compile = torch_tensorrt.dynamo.convert_exported_program_to_serialized_trt_engine
    return torch_tensorrt


_NATIVE = ("libtorchtrt.so", "libtorchtrt_runtime.so")
