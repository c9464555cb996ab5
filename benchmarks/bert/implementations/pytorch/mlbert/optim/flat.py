"""All parameters of a model in one contiguous buffer, and their gradients in another.

Optimizers, gradient reduction and checkpoints work on slices of two long buffers instead of several
hundred small tensors. The model keeps its parameters, which become views.

Legend: G parameters ("segments"); P pieces (parts of parameters within a shard); B blocks, each
within one piece; n elements of the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

# The benchmark names its tensors "LayerNorm/gamma", "LayerNorm/beta" and "bias";
# PyTorch models use "LayerNorm.weight".
MOST_STATES = 3  # buffers of an update rule's state
UNDECAYED_NAMES = ("LayerNorm", "layer_norm", "layernorm", "bias", "gamma", "beta")


def is_decayed(name: str) -> bool:
    """Return whether weight decay and LAMB's trust ratio apply to the parameter with this name."""
    return not any(part in name for part in UNDECAYED_NAMES)


@dataclass(frozen=True)
class Segment:
    """The location of one parameter in the flat buffers.

    Attributes:
        name: the parameter's name in the model.
        offset: first element.
        numel: number of elements.
        decay: whether weight decay and the trust ratio apply.
    """

    name: str
    offset: int
    numel: int
    decay: bool


class ParameterPlace:
    """State of one parameter's buffers that the model's matrix products use;
    reached as the parameter's `place`.

    Args:
        gradient: the parameter's gradient.

    Attributes:
        copy: the weights rounded to the activations' dtype,
            kept up to date by the optimizer (None: there is no copy).
        was_overwritten: this step's first write to the gradient did not read it, so the next step
            need not zero it.
        is_stale: the gradient is an earlier step's. It is to be overwritten, or zeroed first.
    """

    def __init__(self, gradient: Tensor) -> None:
        self.copy: Tensor | None = None
        self.was_overwritten = False
        self.is_stale = False
        self._gradient = gradient
        # Counted steps have tensors of a GPU that does not exist.
        self._is_on_gpu = gradient.is_cuda and torch.cuda.is_initialized()
        self._cleared: bool | None = None

    @property
    def is_clear(self) -> bool:
        """Whether the gradient is zero or stale, so that a product may overwrite it instead of
        adding to it.

        A CUDA graph that captures both the clearing and the write replays both. A graph that does
        not capture the clearing has to add.
        """
        return self._cleared == self._is_capturing()

    def begin(self, is_stale: bool) -> None:
        """Record that a step begins: the gradient has been zeroed, or is stale."""
        self._cleared = self._is_capturing()
        self.is_stale = is_stale
        self.was_overwritten = False

    def before_adding(self) -> None:
        """Zero a stale gradient. Call it before anything is added to the gradient."""
        if self.is_stale:
            self._gradient.zero_()
        self.is_stale = False
        self._cleared = None

    def after_writing(self) -> None:
        """Record that an op has overwritten the gradient if it was clear, else added to it."""
        if self.is_clear:
            self.was_overwritten = True
        self.is_stale = False
        self._cleared = None

    def _is_capturing(self) -> bool:
        return self._is_on_gpu and torch.cuda.is_current_stream_capturing()


class FlatParameters:
    """Move parameters into one contiguous float32 buffer;
    every `p.data` and `p.grad` becomes a view.

    Parameters are stored back to back in the given order without padding, so adjacent tensors of
    the model (query, key and value weights) can be read as one matrix.

    Args:
        named_parameters: (name, parameter) pairs, each parameter once (`module.named_parameters()`
            yields a tied parameter once); all float32, all on one device.
        multiple: round the storage up to a multiple of this many elements,
            so that ranks can divide it equally.
        decayed: returns whether the parameter with a given name is decayed; some runs decay all.

    Attributes:
        data: float32 [sum of numel], the weights.
        grad: float32 [sum of numel], the gradients, initially zero.
        padded_data, padded_grad: the same memory plus the zero padding.
        padded_copy: the copy made by `keep_copy`, same length as `padded_data`, or None.
        segments: one entry per parameter, in order.
        parameters: the parameters, in the same order.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        multiple: int = 1,
        decayed: Callable[[str], bool] = is_decayed,
    ) -> None:
        pairs = list(named_parameters)
        assert pairs, "no parameters"
        self.parameters = [parameter for _, parameter in pairs]
        assert len({id(parameter) for parameter in self.parameters}) == len(pairs), (
            "a parameter is listed twice"
        )
        device = self.parameters[0].device
        self.segments: list[Segment] = []
        self._shapes: list[torch.Size] = []
        total = 0
        for name, parameter in pairs:
            assert parameter.dtype == torch.float32, (
                f"{name} is {parameter.dtype}, master weights are float32"
            )
            assert parameter.device == device, (
                f"{name} is on {parameter.device}, the others are on {device}"
            )
            self.segments.append(Segment(name, total, parameter.numel(), decayed(name)))
            self._shapes.append(parameter.shape)
            total += parameter.numel()
        padded = -(-total // multiple) * multiple
        self.padded_data = torch.zeros(padded, dtype=torch.float32, device=device)
        self.padded_grad = torch.zeros(padded, dtype=torch.float32, device=device)
        self.padded_copy: Tensor | None = None
        self.data = self.padded_data[:total]
        self.grad = self.padded_grad[:total]
        gradients = self._split(self.grad)
        self._places = [ParameterPlace(gradient) for gradient in gradients]
        self._stale: list[ParameterPlace] = []
        self._guarded: set[int] = set()  # indices of parameters, see `_guard`
        views = zip(self.parameters, self._places, self._split(self.data), gradients, strict=True)
        for parameter, place, data, grad in views:
            data.copy_(parameter.data)
            parameter.data = data
            parameter.grad = grad
            parameter.place = place  # type: ignore[attr-defined]
            place.begin(is_stale=False)

    @property
    def numel(self) -> int:
        """Number of parameters (elements)."""
        return self.data.numel()

    @property
    def layout(self) -> list[tuple[str, list[int]]]:
        """Name and shape of each parameter in order, JSON-serializable."""
        return [
            (segment.name, list(shape))
            for segment, shape in zip(self.segments, self._shapes, strict=True)
        ]

    @property
    def offsets(self) -> list[int]:
        """First element of each parameter, in order."""
        return [segment.offset for segment in self.segments]

    def zero_grad(self) -> None:
        """Set all gradients to zero in one write.

        Do not use a module's own `zero_grad()`: it drops the views.
        """
        self.padded_grad.zero_()
        self._stale = []
        for place in self._places:
            place.begin(is_stale=False)

    def begin_gradients(self) -> None:
        """Zero the gradients, except for those that products overwrote in the step before and are
        expected to overwrite again.

        Call `finish_gradients` after each backward pass. Whatever the passes do, the gradients are
        then the same as after `zero_grad`: what is added to an expected one zeroes it before, and
        what nothing wrote is zeroed then.

        The passes must run between this call and the next: with CUDA graphs, one graph captures
        them all.
        """
        expected = [
            place.was_overwritten and parameter.requires_grad
            for place, parameter in zip(self._places, self.parameters, strict=True)
        ]
        if not any(expected):
            self.zero_grad()
            return
        for start, stop in self._runs_without(expected):
            self.padded_grad[start:stop].zero_()
        self._stale = []
        for index, place in enumerate(self._places):
            place.begin(is_stale=expected[index])
            if expected[index]:
                self._guard(index)
                self._stale.append(place)

    def finish_gradients(self) -> None:
        """Zero the gradients of this step that no backward pass has written."""
        for place in self._stale:
            if place.is_stale:
                place.before_adding()
        self._stale = []

    def _guard(self, index: int) -> None:
        """Have autograd zero the parameter's gradient before it adds to it, if it is stale."""
        if index not in self._guarded:
            self._guarded.add(index)
            place = self._places[index]
            self.parameters[index].register_hook(lambda gradient: place.before_adding())

    def _runs_without(self, left_out: Sequence[bool]) -> list[tuple[int, int]]:
        """Return start and stop of the runs of adjacent parameters that are not left out, and those
        of the padding, which a factor that is not finite may have made NaN.
        """
        runs: list[tuple[int, int]] = []
        for segment, is_left_out in zip(self.segments, left_out, strict=True):
            stop = segment.offset + segment.numel
            if is_left_out:
                continue
            if runs and runs[-1][1] == segment.offset:
                runs[-1] = (runs[-1][0], stop)
            else:
                runs.append((segment.offset, stop))
        padded = self.padded_grad.numel()
        if padded > self.numel:
            runs.append((self.numel, padded))
        return runs

    def keep_copy(self, dtype: torch.dtype | None) -> None:
        """Keep a second copy of the weights in this dtype,
        which the optimizer updates (None disables it).
        """
        self.padded_copy = (
            None if dtype is None else torch.empty_like(self.padded_data, dtype=dtype)
        )
        copies = (
            [None] * len(self._places)
            if self.padded_copy is None
            else self._split(self.padded_copy)
        )
        for place, copy in zip(self._places, copies, strict=True):
            place.copy = copy

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Split a buffer of the same length (weights, gradients, an optimizer's moments) into one
        view per parameter.

        Args:
            buffer: any dtype, [numel].

        Returns:
            parameter name -> view with the parameter's shape.
        """
        assert buffer.numel() == self.numel, (
            f"{buffer.numel()} elements, but the model has {self.numel}"
        )
        return {
            segment.name: view
            for segment, view in zip(self.segments, self._split(buffer), strict=True)
        }

    def _split(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer[segment.offset : segment.offset + segment.numel].view(shape)
            for segment, shape in zip(self.segments, self._shapes, strict=True)
        ]


@dataclass(frozen=True)
class Piece:
    """The part of one parameter that a shard holds.

    Attributes:
        start, stop: range of elements within the shard.
        owner: index of the parameter.
        decay: as in `Segment`.
    """

    start: int
    stop: int
    owner: int
    decay: bool


def pieces_of(parts: Sequence[tuple[int, int]], segments: Sequence[Segment]) -> list[Piece]:
    """Split a shard, given as ascending `parts` of the buffer, at segment borders;
    padding belongs to no piece.
    """
    pieces = []
    before = 0
    index = 0
    for start, stop in parts:
        # The segment in which the last part ended may continue in this one.
        while index and segments[index].offset > start:
            index -= 1
        while index < len(segments) and segments[index].offset < stop:
            segment = segments[index]
            first = max(start, segment.offset)
            last = min(stop, segment.offset + segment.numel)
            if first < last:
                pieces.append(
                    Piece(before + first - start, before + last - start, index, segment.decay)
                )
            index += 1
        index = max(index - 1, 0)
        before += stop - start
    return pieces


@dataclass(frozen=True)
class Blocks:
    """Pieces cut into blocks: sums are computed per block,
    and a parameter's block sums are added in order.

    Attributes:
        offsets, lengths: int64 [B], elements of the shard.
        owners: int64 [B], ascending parameter indices.
        decays: int64 [B], 1 if weight decay applies.
        first: int64 [G + 1], each parameter's first block;
            equal neighbors if the shard holds no part of it.
    """

    offsets: np.ndarray
    lengths: np.ndarray
    owners: np.ndarray
    decays: np.ndarray
    first: np.ndarray

    @classmethod
    def of(cls, pieces: Sequence[Piece], num_owners: int, block: int) -> Blocks:
        """Cut pieces into blocks of at most `block` elements."""
        columns = [(p.start, p.stop, p.owner, p.decay) for p in pieces]
        starts, stops, owners, decays = np.array(columns, dtype=np.int64).reshape(-1, 4).T
        counts = -(-(stops - starts) // block)
        piece = np.repeat(np.arange(len(counts)), counts)
        # A block's offset within its piece: its index minus that of the piece's first block,
        # in elements.
        within = (np.arange(len(piece)) - (np.cumsum(counts) - counts)[piece]) * block
        return cls(
            offsets=starts[piece] + within,
            lengths=np.minimum((stops - starts)[piece] - within, block),
            owners=owners[piece],
            decays=decays[piece],
            first=np.searchsorted(owners[piece], np.arange(num_owners + 1)),
        )
