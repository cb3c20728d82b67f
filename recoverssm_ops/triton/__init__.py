"""Triton kernels for CUDA tensors, imported on the first call: ``launch.py`` implements the operators."""
