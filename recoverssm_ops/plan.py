"""Plan the memory of speculative decoding: ``python -m recoverssm_ops.plan``, installed as ``recoverssm-plan``.

From a model's shape or its Hugging Face config.json: the bytes of a request, the requests that fit into a cache budget, and the
full attention tokens that the freed bytes buy, for one state per window position and for RecoverSSM. All figures are of one
GPU unless a row says otherwise. Needs no GPU and no weights.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from fractions import Fraction

import torch

from recoverssm_ops.kimi_config import DTYPES, read_kimi_config
from recoverssm_ops.memory_plan import MemoryPlan
from recoverssm_ops.state_spec import LayerShape, StateSpec, expect_size

CACHE_DTYPES = {**DTYPES, "float8": torch.float8_e4m3fn}
UNITS = {"": 1, "B": 1, **{f"{p}B": 1000**i for i, p in enumerate("KMGT", 1)}}
UNITS |= {f"{p}iB": 1024**i for i, p in enumerate("KMGT", 1)}


def plain_table(plan: MemoryPlan) -> str:
    """The table in plain text: what a pipe or a terminal without rich gets."""
    head = ("", "plain", "recoverssm")
    rows = [head, *plan.rows()]
    widths = [max(len(r[i]) for r in rows) for i in range(3)]
    rule = "-" * (sum(widths) + 4)
    lines = [
        f"{r[0]:<{widths[0]}}  {r[1]:>{widths[1]}}  {r[2]:>{widths[2]}}".rstrip() if any(r) else rule for r in rows
    ]
    return "\n".join([plan.title(), "", lines[0], rule, *lines[1:], "", plan.summary()])


def print_table(plan: MemoryPlan) -> None:
    """rich draws it on a terminal where it is installed; the words and figures are the same."""
    if sys.stdout.isatty():
        try:
            from rich.console import Console
            from rich.table import Table
        except ImportError:
            pass
        else:
            table = Table("")
            table.add_column("plain", justify="right")
            table.add_column("recoverssm", justify="right", style="green")
            for row in plan.rows():
                table.add_row(*row) if any(row) else table.add_section()
            Console(highlight=False).print(plan.title(), "", table, "", plan.summary(), sep="\n")
            return
    print(plain_table(plan))


def parse_bytes(text: str) -> int:
    """``"46.48GiB"``, ``"40 GB"`` or a number of bytes."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", text.strip())
    units = {unit.lower(): factor for unit, factor in UNITS.items()}
    if match is None or match[2].lower() not in units:
        raise argparse.ArgumentTypeError(
            f"should be a size such as 46.5GiB, 40GB or a number of bytes, but was {text!r}"
        )
    return int(Fraction(match[1]) * units[match[2].lower()])


def argument_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="recoverssm-plan", description=__doc__.partition("\n\n")[2])
    shape = parser.add_argument_group("model, from a config or by sizes (a size given overrides the config)")
    shape.add_argument(
        "--config", help="Hugging Face config.json of Kimi-Linear or a model built like it, or its directory"
    )
    shape.add_argument("--layers", type=int, help="linear attention layers")
    shape.add_argument("--heads", type=int, help="q and k heads of the whole model")
    shape.add_argument("--value-heads", type=int, help="default: --heads")
    shape.add_argument("--key-dim", type=int, help="K (default 128)")
    shape.add_argument("--value-dim", type=int, help="V (default: K)")
    shape.add_argument("--conv-width", type=int, help="W of the short convolution; 0: none (default 4)")
    shape.add_argument("--conv-channels", type=int, help="default: q, k and v side by side")
    shape.add_argument("--scalar-gate", action="store_true", help="one decay a head (gated delta rule)")
    shape.add_argument("--full-attention-layers", type=int, help="layers with a KV cache")
    shape.add_argument("--kv-elements", type=int, help="values cached per token and such layer on one GPU")
    dtypes = parser.add_argument_group("dtypes")
    dtypes.add_argument("--state-dtype", choices=DTYPES, default="float32", help="recurrent state (default float32)")
    dtypes.add_argument(
        "--dtype", choices=DTYPES, help="activations and conv state (default: the config's, or bfloat16)"
    )
    dtypes.add_argument("--kv-dtype", choices=CACHE_DTYPES, help="KV cache (default: --dtype)")
    serving = parser.add_argument_group("serving")
    serving.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share the heads of a request")
    serving.add_argument(
        "--data-parallel", type=int, default=1, help="attention replicas, as in expert parallel serving"
    )
    serving.add_argument("--drafts", type=int, default=7, help="draft tokens a step (default 7)")
    serving.add_argument("--requests", type=int, default=1, help="running together on all GPUs (default 1)")
    serving.add_argument(
        "--context", type=int, default=0, help="KV cache tokens of each request (default 0: state alone)"
    )
    serving.add_argument("--budget", type=parse_bytes, help="cache memory of one GPU, such as 46.5GiB")
    parser.add_argument("--json", action="store_true", help="print JSON with exact bytes instead of the table")
    return parser


def plan_from(options: argparse.Namespace) -> MemoryPlan:
    """Raises ValueError for options that no model or machine could honour."""
    known, full_layers, elements, dtype = {}, options.full_attention_layers, options.kv_elements, torch.bfloat16
    if options.config is not None:
        shape = read_kimi_config(options.config)
        known = {"layers": shape.num_layers, "heads": shape.num_heads, "key_dim": shape.head_dim}
        known["conv_width"] = shape.conv_width
        dtype = shape.activation_dtype
        full_layers = shape.full_attention_layers if full_layers is None else full_layers
        if elements is None and full_layers:
            elements = shape.kv_elements(options.tensor_parallel)

    def size(name: str, default: int | None = None) -> int:
        value = getattr(options, name)
        value = known.get(name, default) if value is None else value
        if value is None:
            raise ValueError(f"--{name} is missing: give it, or --config")
        return value

    if options.dtype is not None:
        dtype = DTYPES[options.dtype]
    if bool(full_layers) != bool(elements):
        raise ValueError("--full-attention-layers and --kv-elements should be given together")
    expect_size("--drafts", options.drafts, 0)
    for name in ("full_attention_layers", "kv_elements"):
        if getattr(options, name) is not None:
            expect_size(f"--{name.replace('_', '-')}", getattr(options, name), 0)
    layer = LayerShape(
        num_heads=size("heads"),
        head_k_dim=size("key_dim", 128),
        num_value_heads=options.value_heads,
        head_v_dim=options.value_dim,
        conv_width=size("conv_width", 4) or None,
        conv_channels=options.conv_channels,
        scalar_gate=options.scalar_gate,
        state_dtype=DTYPES[options.state_dtype],
        conv_dtype=dtype,
    )
    spec = StateSpec(
        layer=layer,
        num_layers=size("layers"),
        window=1 + options.drafts,
        tensor_parallel=options.tensor_parallel,
        data_parallel=options.data_parallel,
        activation_dtype=dtype,
    )
    kv_dtype = dtype if options.kv_dtype is None else CACHE_DTYPES[options.kv_dtype]
    kv_bytes = (full_layers or 0) * (elements or 0) * kv_dtype.itemsize
    return MemoryPlan(spec, options.requests, options.context, kv_bytes, options.budget)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser()
    options = parser.parse_args(arguments)
    try:
        plan = plan_from(options)
    except (ValueError, TypeError) as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")
    if options.json:
        print(json.dumps(plan.as_json(), indent=2))
    else:
        print_table(plan)
    return 0


if __name__ == "__main__":
    sys.exit(main())
