"""Bits per byte, and peak memory."""

import lzma
import math

import pytest
import torch

from models.config import KDAConfig
from models.evaluation import bits_per_byte, xz_bits_per_byte
from models.memory import peak_allocation
from models.model import KDAForCausalLM

TINY = KDAConfig(hidden_size=16, num_layers=2, full_attn_period=2, num_heads=2, head_k_dim=8, head_v_dim=8, gate_rank=4)


def tiny_model():
    torch.manual_seed(0)
    model = KDAForCausalLM(TINY).eval().requires_grad_(False)
    model.embed_tokens.weight.normal_()
    return model


@pytest.mark.parametrize("length", [1, 2, 5, 16, 17, 24, 25, 61, 64, 65])
def test_every_byte_is_counted_once(length):
    model, window = tiny_model(), 16
    text = torch.randint(256, (length,), generator=torch.Generator().manual_seed(length), dtype=torch.uint8)
    nats = 8 * math.log(2)  # the first byte
    for i in range(1, length):
        # Byte i is predicted in the window that has it in its second half, or in the first.
        start = max(0, (i - 1) // (window // 2) - 1) * (window // 2)
        nats -= model(text[None, start:i].long())[0, -1].log_softmax(-1)[text[i].item()].item()
    expected = nats / math.log(2) / length
    assert bits_per_byte(model, text, window=window, batch=3) == pytest.approx(expected, rel=1e-5)


def test_a_model_that_knows_nothing_needs_eight_bits():
    model = tiny_model()
    model.norm.weight.zero_()
    assert bits_per_byte(model, torch.arange(100, dtype=torch.uint8), window=16) == pytest.approx(8.0)


def test_xz_bits_are_the_files_size():
    text, prefix = b"def f(x):\n    return x\n" * 40, b"def f(x):\n" * 100
    assert xz_bits_per_byte(text) == 8 * len(lzma.compress(text, preset=9)) / len(text)
    added = len(lzma.compress(prefix + text, preset=9)) - len(lzma.compress(prefix, preset=9))
    assert xz_bits_per_byte(text, prefix) == 8 * added / len(text)


MIB = 1 << 18  # float32 elements


def test_peak_counts_what_lives_together():
    def together():
        a = torch.empty(3 * MIB)
        b = torch.empty(5 * MIB)
        return a[0], b[0]

    def one_after_the_other():
        a = torch.empty(3 * MIB)
        del a
        torch.empty(5 * MIB)

    assert peak_allocation(together, "cpu") == pytest.approx(8 << 20, abs=4096)
    assert peak_allocation(one_after_the_other, "cpu") == pytest.approx(5 << 20, abs=4096)


def test_peak_ignores_what_was_there_before():
    before = torch.empty(7 * MIB)

    def call():
        torch.empty(MIB)
        return before.shape

    assert peak_allocation(call, "cpu") == pytest.approx(1 << 20, abs=4096)
