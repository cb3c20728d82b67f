"""A soak of the engine: random requests, arrivals, acceptance and preemption, on a small random model."""

from __future__ import annotations

import random
from collections.abc import Mapping

import torch

from models.config import KDAConfig
from models.drafting import prompt_lookup
from models.model import KDAForCausalLM
from models.requests import Request

SOAK_CONFIG = KDAConfig(
    vocab_size=17,
    hidden_size=16,
    num_layers=4,
    num_heads=2,
    head_k_dim=6,
    head_v_dim=10,
    gate_rank=4,
    intermediate_size=24,
    # A tied head would prefer the token just read, and greedy text would repeat it for ever.
    tie_word_embeddings=False,
    max_length=96,
)


def random_model(seed: int, config: KDAConfig = SOAK_CONFIG, device: torch.device | str = "cpu") -> KDAForCausalLM:
    """Weights far from the start of training, so that greedy text wanders instead of repeating one token.

    In float64: the order in which a batch's products are summed must not decide between two tokens.
    """
    generator = torch.Generator().manual_seed(seed)
    model = KDAForCausalLM(config).double().eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            std = 1.0 if "embed" in name else parameter.shape[1] ** -0.5
            parameter.normal_(std=std, generator=generator)
        elif name.endswith(("A_log", "dt_bias")):
            parameter.uniform_(-1.0, 1.0, generator=generator)
    return model.to(device)


def random_prompts(count: int, longest: int, window: int, block_size: int, generator: random.Random) -> list[bytes]:
    """Distinct prompts of 1 to ``longest`` tokens, most of which begin as others do; fewer, where few exist.

    Among the lengths are those at which something may go wrong: about a window, about a multiple of the block size.
    """
    vocab = SOAK_CONFIG.vocab_size

    def tokens(n: int) -> bytes:
        return bytes(generator.randrange(vocab) for _ in range(n))

    edges = {1, 2, window - 1, window, window + 1, 2 * window, longest}
    edges |= {n + d for n in range(block_size, longest, block_size) for d in (-1, 0, 1)}
    lengths = sorted(n for n in edges if 1 <= n <= longest)
    heads = [tokens(longest) for _ in range(max(1, count // 12))]
    prompts: dict[bytes, None] = {}
    for _ in range(20 * count):
        if len(prompts) == count:
            break
        length = generator.choice(lengths) if generator.random() < 0.5 else generator.randint(1, longest)
        head = generator.choice(heads)[: generator.randint(0, length)]
        prompts[head + tokens(length - len(head))] = None
    return list(prompts)


class AdversarialDrafter:
    """Drafts made from the text that is to come: all right, all wrong, wrong somewhere, too few, or not at all."""

    def __init__(self, full_texts: Mapping[bytes, bytes], generator: random.Random) -> None:
        self.full_texts = [prompt + continuation for prompt, continuation in full_texts.items()]
        self.generator = generator

    def __call__(self, text: bytearray, n: int) -> bytes:
        generator, vocab = self.generator, SOAK_CONFIG.vocab_size
        full = next((full for full in self.full_texts if full.startswith(text)), b"")
        right = full[len(text) : len(text) + n]
        kind = generator.randrange(6)
        if kind == 0:
            return b""
        if kind == 1:
            return right
        if kind == 2:
            return bytes((token + 1) % vocab for token in right)
        if kind == 3 and right:
            at = generator.randrange(len(right))
            return right[:at] + bytes([(right[at] + 1) % vocab]) + right[at + 1 :]
        if kind == 4:
            return prompt_lookup(text, n, min_ngram=1)
        return right[: generator.randint(0, len(right))]


def random_requests(count: int, prompts: list[bytes], most_tokens: int, generator: random.Random) -> list[Request]:
    vocab = SOAK_CONFIG.vocab_size
    return [
        Request(
            generator.choice(prompts),
            generator.randint(1, most_tokens),
            generator.randrange(vocab) if generator.random() < 0.2 else None,
        )
        for _ in range(count)
    ]
