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


def source_line(node: Node) -> str:
    """``file:line: text`` of the innermost frame that the graph remembers, else the node's name."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in .*\n\s*(.*)', node.meta.get("stack_trace") or "")
    if not frames:
        return node.name
    path, line, text = frames[-1]
    return f"{path.rsplit('/', 1)[-1]}:{line}: {text.strip()}"
