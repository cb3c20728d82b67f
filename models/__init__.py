"""A generic Kimi-Delta-Attention language model in plain PyTorch, its speculative decoding loop and the main job.

Run from a checkout: ``python -m models.generate``, ``python -m models.train``. The model and the loop use none of this
project's operators: they are what a user's own model looks like before the compile pass rewrites it.
"""
