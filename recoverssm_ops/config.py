"""What an engine asks of RecoverSSM, checked before weights are loaded."""

from collections.abc import Iterable
from dataclasses import dataclass, fields

import torch

from recoverssm_ops.state_spec import LayerShape, StateSpec, expect_size
from recoverssm_ops.validation import FLOATS, MAX_CONV_WIDTH, MAX_HEAD_DIM, MAX_WINDOW, MIN_CONV_WIDTH

CACHE_MODES = ("none", "align")
MAX_DRAFTS = MAX_WINDOW - 1


@dataclass(frozen=True, kw_only=True)
class RecoverSSMConfig:
    """A combination of model and serving options that works; one that cannot work is refused at construction.

    Attributes:
        layers: a :class:`LayerShape` per linear attention layer of the whole model; all equal, because one launch commits
            them all.
        drafts: draft tokens a step, 1 to 15; a request may draft fewer, or none, at any step.
        max_seqlen: window tokens of a row that records and captured graphs hold, at least ``1 + drafts``; None: just that.
        tensor_parallel: ranks that share the heads.
        activation_dtype: of q, k, v and the convolution's inputs.
        stochastic_rounding: of the state; the operators round to nearest, so it has to be False.
        cache_mode: prefix caching: "none", or "align": state blocks of ``state_block_size`` tokens.
        state_block_size: tokens of a *state* block, whatever the attention's block size is. Any size: several boundaries in
            one window work.
        max_length: tokens that a request may reach, prompt included.
        blocks_per_request: columns of the block table.
        new_blocks_per_step: state blocks that the engine can allocate to one request for one step; None: as many as
            the window needs.

    The last four belong to "align", and are ignored by "none". The first three of them are required there.

    Raises:
        ValueError, TypeError: the message starts with the field, and says what it should be and what to change.
    """

    layers: tuple[LayerShape, ...]
    drafts: int | None
    max_seqlen: int | None = None
    tensor_parallel: int = 1
    activation_dtype: torch.dtype = torch.bfloat16
    stochastic_rounding: bool = False
    cache_mode: str = "none"
    state_block_size: int | None = None
    max_length: int | None = None
    blocks_per_request: int | None = None
    new_blocks_per_step: int | None = None

    def __post_init__(self) -> None:
        self._check_layers()
        self._check_window()
        if self.stochastic_rounding is not False:
            raise ValueError(
                f"stochastic_rounding should be False, but was {self.stochastic_rounding!r}: states are rounded to nearest, so "
                "that the same window gives the same bits; turn it off, and use a float32 state_dtype where that is too coarse"
            )
        if self.cache_mode not in CACHE_MODES:
            raise ValueError(
                f"cache_mode should be 'none' or 'align', but was {self.cache_mode!r}: a state is published at block "
                "boundaries alone, so choose 'align' for prefix caching"
            )
        if self.cache_mode == "align":
            self._check_blocks()

    @property
    def window(self) -> int:
        """T = 1 + drafts: the last committed token and the drafts."""
        return 1 + self.drafts

    @property
    def spec(self) -> StateSpec:
        """Bytes of everything that has to be allocated."""
        return StateSpec(
            layer=self.layers[0],
            num_layers=len(self.layers),
            window=self.window,
            tensor_parallel=self.tensor_parallel,
            activation_dtype=self.activation_dtype,
        )

    @property
    def boundaries_per_window(self) -> int:
        """The most block boundaries that a window reaches; a commit plan has one column more. 0 without prefix caching."""
        return -(-self.window // self.state_block_size) if self.cache_mode == "align" else 0

    def _check_layers(self) -> None:
        if isinstance(self.layers, LayerShape) or not isinstance(self.layers, Iterable):
            raise TypeError(f"layers should be LayerShapes, one a linear attention layer, but was {self.layers!r}")
        layers = tuple(self.layers)
        object.__setattr__(self, "layers", layers)
        if not layers:
            raise ValueError(
                "layers should hold at least one linear attention layer, but was empty: leave RecoverSSM off"
            )
        for i, layer in enumerate(layers):
            if not isinstance(layer, LayerShape):
                raise TypeError(f"layers[{i}] should be a LayerShape, but was {layer!r}")
        first = layers[0]
        for name in ("state_dtype", "conv_dtype"):
            if getattr(first, name) not in FLOATS:
                raise ValueError(
                    f"layers[0].{name} should be {_names(FLOATS)}, but was {_names([getattr(first, name)])}: choose another "
                    "dtype for the pool"
                )
        for name in ("head_k_dim", "head_v_dim"):
            if getattr(first, name) > MAX_HEAD_DIM:
                raise ValueError(f"layers[0].{name} should be at most {MAX_HEAD_DIM}, but was {getattr(first, name)}")
        width = first.conv_width
        if width is not None and not MIN_CONV_WIDTH <= width <= MAX_CONV_WIDTH:
            raise ValueError(
                f"layers[0].conv_width should be {MIN_CONV_WIDTH} to {MAX_CONV_WIDTH}, or None for a layer without a short "
                f"convolution, but was {width}"
            )
        for i, layer in enumerate(layers):
            for field in fields(LayerShape):
                value, wanted = getattr(layer, field.name), getattr(first, field.name)
                if value != wanted:
                    raise ValueError(
                        f"layers[{i}].{field.name} should be {wanted} as in layers[0], but was {value}: one launch commits all "
                        "layers, so give layers of another shape a config of their own"
                    )

    def _check_window(self) -> None:
        if self.activation_dtype not in FLOATS:
            found = _names([self.activation_dtype])
            raise ValueError(f"activation_dtype should be {_names(FLOATS)}, but was {found}")
        if self.drafts is None or (self.drafts == 0 and not isinstance(self.drafts, bool)):
            raise ValueError(
                f"drafts should be 1 to {MAX_DRAFTS}, but was {self.drafts}: RecoverSSM is for speculative decoding, so "
                "configure a drafter, or leave RecoverSSM off"
            )
        expect_size("drafts", self.drafts)
        if self.drafts > MAX_DRAFTS:
            raise ValueError(
                f"drafts should be 1 to {MAX_DRAFTS}, but was {self.drafts}: a window has at most "
                f"{MAX_WINDOW} tokens, so draft fewer"
            )
        if self.max_seqlen is not None:
            expect_size("max_seqlen", self.max_seqlen)
            if not self.window <= self.max_seqlen <= MAX_WINDOW:
                raise ValueError(
                    f"max_seqlen should be {self.window} (1 + drafts) to {MAX_WINDOW}, but was {self.max_seqlen}: records hold "
                    "max_seqlen tokens of a row, so change it, or drafts"
                )
        # Refuses ranks that do not divide the heads.
        _ = self.spec

    def _check_blocks(self) -> None:
        for name in ("state_block_size", "max_length", "blocks_per_request"):
            if getattr(self, name) is None:
                raise ValueError(
                    f"{name} should be given with cache_mode 'align', but was None: give it, or use 'none'"
                )
            expect_size(name, getattr(self, name))
        needed = -(-self.max_length // self.state_block_size)
        if self.blocks_per_request < needed:
            raise ValueError(
                f"blocks_per_request should be at least {needed} (max_length {self.max_length} in state blocks of "
                f"{self.state_block_size}), but was {self.blocks_per_request}: widen the block table, use larger state blocks, "
                f"or limit max_length to {self.blocks_per_request * self.state_block_size}"
            )
        if self.new_blocks_per_step is not None:
            expect_size("new_blocks_per_step", self.new_blocks_per_step)
            if self.new_blocks_per_step < self.boundaries_per_window:
                smallest = -(-self.window // self.new_blocks_per_step)
                raise ValueError(
                    f"new_blocks_per_step should be at least {self.boundaries_per_window} (a window of {self.window} tokens in "
                    f"state blocks of {self.state_block_size}), but was {self.new_blocks_per_step}: allocate more blocks "
                    f"a step, use state_block_size {smallest} or more, or fewer drafts"
                )


def _names(dtypes: Iterable[object]) -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
