"""Triton kernels for CUDA tensors: ``launch.py`` has the operators' CUDA implementations. Imported on their first call."""
