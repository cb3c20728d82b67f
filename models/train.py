"""Train the shipped byte-level model on the standard library's source: ``python -m models.train``."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import platform
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from models.config import PRESETS
from models.corpus import read_splits
from models.evaluation import bits_per_byte, xz_bits_per_byte
from models.model import KDAForCausalLM
from models.model_card import Figures, write_model_card
from models.persistence import WEIGHTS, load_model, save_model


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m models.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=WEIGHTS, help="directory for weights, configuration and model card")
    parser.add_argument("--minutes", type=float, default=3.5, help="training time, the compilation included")
    parser.add_argument("--steps", type=int, default=None, help="stop (and end the schedule) after this many steps")
    parser.add_argument("--batch", type=int, default=64, help="sequences a step")
    parser.add_argument("--seq-len", type=int, default=1024, help="bytes a sequence")
    parser.add_argument("--lr", type=float, default=2e-3, help="peak learning rate")
    parser.add_argument("--weight-decay", type=float, default=0.1)
    parser.add_argument("--dropout", type=float, default=0.2)
    parser.add_argument("--warmup", type=int, default=200, help="steps of linear warm-up")
    parser.add_argument("--eval-every", type=float, default=10.0, help="seconds between validations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true", help="run eagerly")
    arguments = parser.parse_args(argv)
    if arguments.minutes <= 0:
        parser.error(f"--minutes should be positive, got {arguments.minutes}")
    if not 0 <= arguments.dropout < 1:
        parser.error(f"--dropout should be in [0, 1), got {arguments.dropout}")
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: this PyTorch sees no CUDA GPU")
    return arguments


def optimizer_for(model: KDAForCausalLM, lr: float, weight_decay: float, fused: bool) -> torch.optim.AdamW:
    # Norms, gates' offsets and convolution taps are not matrices: decaying them is no regularisation.
    decayed = {id(p) for name, p in model.named_parameters() if p.dim() == 2 and "conv1d" not in name}
    groups = [
        {"params": [p for p in model.parameters() if id(p) in decayed], "weight_decay": weight_decay},
        {"params": [p for p in model.parameters() if id(p) not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


def learning_rate(step: int, progress: float, peak: float, warmup: int) -> float:
    """Linear warm-up in steps, then a cosine over ``progress`` (0..1) down to 2 % of the peak."""
    cosine = 0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    return peak * min(1.0, (step + 1) / warmup) * cosine


def sample_batch(text: Tensor, batch: int, length: int, generator: torch.Generator) -> Tensor:
    """Random excerpts ``[batch, length + 1]`` of the text."""
    starts = torch.randint(len(text) - length, (batch, 1), generator=generator, device=text.device)
    return text[starts + torch.arange(length + 1, device=text.device)].long()


def make_loss(model: KDAForCausalLM, device: str) -> Callable[[Tensor], Tensor]:
    def loss(batch: Tensor) -> Tensor:
        with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
            logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return loss


def train(arguments: argparse.Namespace, splits: dict[str, bytes], console: Console) -> tuple[KDAForCausalLM, Figures]:
    """Train until the time or the steps run out; returns the weights that were best on the validation text."""
    torch.manual_seed(arguments.seed)
    device = arguments.device
    config = dataclasses.replace(PRESETS["bytes"], max_length=arguments.seq_len)
    model = KDAForCausalLM(config, dropout=arguments.dropout).to(device)
    optimizer = optimizer_for(model, arguments.lr, arguments.weight_decay, fused=device == "cuda")
    generator = torch.Generator(device).manual_seed(arguments.seed)
    text = {name: torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device) for name, data in splits.items()}
    loss_of = make_loss(model, device)
    if not arguments.no_compile:
        loss_of = torch.compile(loss_of, fullgraph=True, dynamic=False)

    def validate() -> float:
        model.eval()
        bits = bits_per_byte(model, text["validation"], window=arguments.seq_len)
        model.train()
        return bits

    best_bits, best_step, best_weights = math.inf, 0, None
    history = []
    seconds = 60 * arguments.minutes
    started = last_validation = time.monotonic()
    step, progress, elapsed, compile_seconds = 0, 0.0, 0.0, 0.0
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("training", total=1.0)
        while True:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, progress, arguments.lr, arguments.warmup)
            loss = loss_of(sample_batch(text["train"], arguments.batch, arguments.seq_len, generator))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step == 1 or step % 20 == 0:
                # Reading the loss waits for the device: without it the clock would run ahead of the work.
                train_bits = loss.item() / math.log(2)
                if not math.isfinite(train_bits):
                    raise RuntimeError(f"the loss became {train_bits} at step {step}: lower --lr")
                if step == 1:
                    compile_seconds = time.monotonic() - started
            elapsed = time.monotonic() - started
            progress = max(elapsed / seconds, step / arguments.steps if arguments.steps else 0.0)
            if time.monotonic() - last_validation > arguments.eval_every or progress >= 1:
                bits = validate()
                last_validation = time.monotonic()
                tokens = step * arguments.batch * arguments.seq_len
                history.append({"step": step, "train_bpb": train_bits, "validation_bpb": bits})
                console.print(
                    f"step {step:6d}  {elapsed:5.0f} s  {tokens / 1e6:7.1f} M bytes  "
                    f"train {train_bits:.3f}  validation {bits:.3f} bits/byte"
                )
                if bits < best_bits:
                    best_bits, best_step, best_weights = bits, step, copy.deepcopy(model.state_dict())
            bar.update(task, completed=min(1.0, progress), description=f"step {step}, {train_bits:.3f} bits/byte")
            if progress >= 1:
                break
    if best_weights is None:
        raise RuntimeError("the validation loss was never finite")
    model.load_state_dict(best_weights)
    return model.eval(), Figures(
        python=platform.python_version(),
        torch=torch.__version__,
        device=torch.cuda.get_device_name() if device == "cuda" else "CPU",
        parameters=sum(p.numel() for p in model.parameters()),
        steps=step,
        best_step=best_step,
        tokens_seen=best_step * arguments.batch * arguments.seq_len,
        train_bytes=len(splits["train"]),
        held_out_bytes=len(splits["held_out"]),
        seconds=elapsed,
        compile_seconds=compile_seconds,
        validation_bpb=best_bits,
        history=history,
    )


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(argv)
    console = Console()
    # TF32 for the recurrence's products; its ten mantissa bits are still finer than the bf16 activations around them.
    torch.set_float32_matmul_precision("high")
    splits = read_splits()
    console.print({name: f"{len(data) / 1e6:.2f} MB" for name, data in splits.items()})
    with ThreadPoolExecutor() as pool:
        # xz needs a minute on one core and releases the interpreter: it runs beside the training.
        xz = pool.submit(xz_bits_per_byte, splits["held_out"])
        xz_primed = pool.submit(xz_bits_per_byte, splits["held_out"], splits["train"])
        model, figures = train(arguments, splits, console)
        path = save_model(model, arguments.out)
        # What is evaluated is what was written: the rounded weights, in full float32 arithmetic.
        torch.set_float32_matmul_precision("highest")
        shipped = load_model(arguments.out, device=arguments.device)
        held_out = torch.frombuffer(bytearray(splits["held_out"]), dtype=torch.uint8).to(arguments.device)
        figures = dataclasses.replace(
            figures,
            held_out_bpb=bits_per_byte(shipped, held_out, window=arguments.seq_len),
            xz_bpb=xz.result(),
            xz_primed_bpb=xz_primed.result(),
            file_bytes=path.stat().st_size,
        )
    write_model_card(arguments.out, figures, arguments)
    console.print(
        f"held-out modules: {figures.held_out_bpb:.3f} bits/byte; xz -9 {figures.xz_bpb:.3f}, "
        f"given the training text {figures.xz_primed_bpb:.3f}"
    )
    console.print(f"wrote {path} ({figures.file_bytes / 1e6:.2f} MB)")


if __name__ == "__main__":
    main()
