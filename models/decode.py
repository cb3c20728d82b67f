"""The decoding loop: plain and speculative, prompt and continuation, through one step function."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from models.drafting import prompt_lookup
from models.pools import Pools

# A drafter proposes up to n tokens after the text so far.
Drafter = Callable[[bytearray, int], bytes]


@dataclasses.dataclass
class Decoded:
    """What the loop produced and took. Steps in which some request still read its prompt count as prefill."""

    continuations: list[bytes]
    emitted: list[int] = dataclasses.field(default_factory=list)  # per request and decode step, in order of time
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else float("nan")

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens a request advances in a step: accepted drafts and the one sampled token."""
        return sum(self.emitted) / len(self.emitted) if self.emitted else float("nan")


class Noise:
    """The random tensors of a step, from one seeded generator; constants for greedy decoding, which reads none."""

    def __init__(
        self, batch: int, window: int, vocab: int, greedy: bool, seed: int, device: torch.device | str
    ) -> None:
        self.greedy = greedy
        self.generator = torch.Generator(device).manual_seed(seed)
        self.uniform = torch.zeros(batch, window, device=device)
        self.exponential = torch.ones(batch, vocab, device=device)

    def draw(self) -> tuple[Tensor, Tensor]:
        if not self.greedy:
            self.uniform.uniform_(generator=self.generator)
            self.exponential.exponential_(generator=self.generator)
        return self.uniform, self.exponential


@torch.no_grad()
def decode(
    step: Callable[..., tuple[Tensor, Tensor]],
    pools: Pools,
    prompts: Sequence[bytes],
    *,
    num_tokens: int,
    num_drafts: int,
    vocab_size: int = 256,
    temperature: float = 0.0,
    seed: int = 0,
    drafter: Drafter = prompt_lookup,
    on_emit: Callable[[int, bytes], None] | None = None,
) -> Decoded:
    """Continue every prompt by ``num_tokens`` tokens, ``1 + num_drafts`` window tokens a step.

    ``step`` is a :class:`models.speculation.SpeculativeStep` over ``pools`` (compiled or not): slots 0 .. B-1 are used.
    ``num_drafts = 0`` is plain decoding. ``on_emit(request, tokens)`` is called as tokens appear; all but the last of a
    call were drafts. Raises ValueError if a request does not fit the pools.
    """
    window_size, batch = 1 + num_drafts, len(prompts)
    if not all(prompts):
        raise ValueError("every prompt should have at least one token, got an empty one")
    longest = max(map(len, prompts)) + num_tokens + window_size
    if longest > pools.max_length:
        raise ValueError(f"prompt, tokens and window need {longest} positions, the pools hold {pools.max_length}")

    pools.reset()
    device = next(pools.buffers()).device
    noise = Noise(batch, window_size, vocab_size, temperature <= 0, seed, device)
    slots = torch.arange(batch, device=device)
    temperatures = torch.full((batch,), temperature, device=device)

    texts = [bytearray(prompt) for prompt in prompts]
    wanted = [len(prompt) + num_tokens for prompt in prompts]
    committed = [0] * batch  # tokens of each text that the pools have absorbed; always fewer than the text has
    result = Decoded([])
    while any(len(text) < n for text, n in zip(texts, wanted, strict=True)):
        started = time.perf_counter()
        active = [len(text) < n for text, n in zip(texts, wanted, strict=True)]
        prefilling = any(len(text) - done > 1 for text, done, on in zip(texts, committed, active, strict=True) if on)
        rows, drafts, forced, positions = [], [], [], []
        for b, text in enumerate(texts):
            # What the text has beyond the pools is prompt: one chunk of it, forced. Drafts fill what room is left.
            chunk = bytes(text[committed[b] : committed[b] + window_size]) if active[b] else b"\0"
            room = window_size - len(chunk)
            proposal = drafter(text, min(room, wanted[b] - len(text) - 1)) if active[b] and room else b""
            rows.append([*chunk, *proposal, *bytes(room - len(proposal))])
            forced.append(len(chunk) - 1)
            drafts.append(len(chunk) - 1 + len(proposal))
            # A finished request idles on its own slot from position 0, where there is always room.
            positions.append(committed[b] if active[b] else 0)
        host = (rows, drafts, forced, positions)
        window, num_drafts_, num_forced, positions_ = (torch.tensor(x, device=device) for x in host)
        tokens, num_accepted = step(window, num_drafts_, num_forced, positions_, slots, temperatures, *noise.draw())

        emitted_now = 0
        for b, (row, n) in enumerate(zip(tokens.tolist(), num_accepted.tolist(), strict=True)):
            if not active[b]:
                continue
            complete = committed[b] + forced[b] + 1 == len(texts[b])
            committed[b] += n
            if complete:
                new = bytes(row[forced[b] : n])
                texts[b] += new
                emitted_now += len(new)
                if not prefilling:
                    result.emitted.append(len(new))
                if on_emit is not None:
                    on_emit(b, new)
        seconds = time.perf_counter() - started
        if prefilling:
            result.prefill_seconds += seconds
        else:
            result.decode_seconds += seconds
            result.decode_tokens += emitted_now
    result.continuations = [bytes(text[len(p) :]) for text, p in zip(texts, prompts, strict=True)]
    return result


def example_inputs(batch: int, num_drafts: int, vocab_size: int, device: torch.device | str) -> tuple[Tensor, ...]:
    """Inputs of one step, to compile or inspect it: every request at position 0, no drafts."""
    zeros = torch.zeros(batch, dtype=torch.int64, device=device)
    window = torch.zeros(batch, 1 + num_drafts, dtype=torch.int64, device=device)
    slots = torch.arange(batch, device=device)
    temperature = torch.zeros(batch, device=device)
    uniform, exponential = Noise(batch, 1 + num_drafts, vocab_size, True, 0, device).draw()
    return window, zeros, zeros.clone(), zeros.clone(), slots, temperature, uniform, exponential
