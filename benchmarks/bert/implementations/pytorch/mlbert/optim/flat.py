"""All parameters of a model as one contiguous buffer, and their gradients as another.

Optimizers, gradient reduction and checkpoints work on slices of two long buffers in place of several hundred small
tensors; the model keeps its parameters, which become views.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# The benchmark names its tensors "LayerNorm/gamma", "LayerNorm/beta" and "bias"; PyTorch models say "LayerNorm.weight".
UNDECAYED_NAMES = ("LayerNorm", "layer_norm", "layernorm", "bias", "gamma", "beta")


def is_decayed(name: str) -> bool:
    """Tells whether weight decay and LAMB's trust ratio apply to the parameter of this name."""
    return not any(part in name for part in UNDECAYED_NAMES)


@dataclass(frozen=True)
class Segment:
    """One parameter's place in the flat buffers.

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


class FlatParameters:
    """Moves parameters into one contiguous float32 buffer; every `p.data` and `p.grad` becomes a view.

    Parameters lie back to back in the order given, without padding, so tensors that follow each other in the model
    (query, key and value weights) can be read as one matrix.

    Args:
        named_parameters: (name, parameter) pairs, each parameter once (`module.named_parameters()` gives a tied
            parameter once); all float32, all on one device.
        multiple: the buffers' storage is rounded up to so many elements, so that ranks can share it out equally.
        decayed: tells by a parameter's name whether it is decayed; some methods decay all.

    Attributes:
        data: float32 [sum of numel], the weights.
        grad: float32 [sum of numel], the gradients, zero at the start.
        padded_data, padded_grad: the same memory with the rest of the storage, which is zero.
        segments: one entry for each parameter, in order.
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
        assert len({id(parameter) for parameter in self.parameters}) == len(pairs), "a parameter is listed twice"
        device = self.parameters[0].device
        self.segments: list[Segment] = []
        self._shapes: list[torch.Size] = []
        total = 0
        for name, parameter in pairs:
            assert parameter.dtype == torch.float32, f"{name} is {parameter.dtype}, master weights are float32"
            assert parameter.device == device, f"{name} is on {parameter.device}, the others are on {device}"
            self.segments.append(Segment(name, total, parameter.numel(), decayed(name)))
            self._shapes.append(parameter.shape)
            total += parameter.numel()
        padded = -(-total // multiple) * multiple
        self.padded_data = torch.zeros(padded, dtype=torch.float32, device=device)
        self.padded_grad = torch.zeros(padded, dtype=torch.float32, device=device)
        self.data, self.grad = self.padded_data[:total], self.padded_grad[:total]
        for parameter, data, grad in zip(self.parameters, self._split(self.data), self._split(self.grad), strict=True):
            data.copy_(parameter.data)
            parameter.data = data
            parameter.grad = grad

    @property
    def numel(self) -> int:
        """Number of parameters (elements)."""
        return self.data.numel()

    @property
    def offsets(self) -> list[int]:
        """First element of each parameter, in order."""
        return [segment.offset for segment in self.segments]

    def zero_grad(self) -> None:
        """Sets all gradients to zero in one write. A module's own `zero_grad()` drops the views: do not use that."""
        self.padded_grad.zero_()

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """Cuts a buffer of the same length (weights, gradients, an optimizer's moments) into one view a parameter.

        Args:
            buffer: any dtype [numel].

        Returns:
            parameter name -> view of the parameter's shape.
        """
        assert buffer.numel() == self.numel, f"{buffer.numel()} elements, the model has {self.numel}"
        return {segment.name: view for segment, view in zip(self.segments, self._split(buffer), strict=True)}

    def _split(self, buffer: Tensor) -> list[Tensor]:
        return [
            buffer[segment.offset : segment.offset + segment.numel].view(shape)
            for segment, shape in zip(self.segments, self._shapes, strict=True)
        ]
