"""Which module of the model a graph node came from."""

from __future__ import annotations

import re

from torch.fx import Node


def module_name(node: Node) -> str:
    """``layers.3.attention`` for a node that this module's ``forward`` computed; empty for the model itself or a function."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    # Dynamo calls modules L['self'].layers.3 or L['self']._modules['layers']._modules['3'], torch.export layers.3.
    path, _ = list(stack.values())[-1]
    path = re.sub(r"^L\['\w+'\]", "", path)
    return re.sub(r"(?:\._modules)?\['?(\w+)'?\]", r".\1", path).strip(".")
