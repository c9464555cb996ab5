"""Muon: the momentum of each hidden matrix is orthogonalized;
all other parameters are updated by AdamW.

For a hidden matrix [R, C], with g the clipped gradient:

    m = beta_1 m + (1 - beta_1) g
    o = orthogonalize(beta_1 m + (1 - beta_1) g)      Nesterov's momentum
    w = w - lr (0.2 sqrt(max(R, C)) o + weight_decay w)

Sources: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024, for the
update and its Newton-Schulz iteration; Liu et al., "Muon is Scalable for LLM Training", arXiv
2502.16982, section 2.2, for the factor, which gives the update the size of AdamW's, so that both
share one learning rate and one weight decay.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from mlbert.optim.adamw import AdamW
from mlbert.optim.flat import FlatParameters
from mlbert.optim.shared_weights import Layout

ROOT_MEAN_SQUARE = 0.2  # of AdamW's updates, as measured in arXiv 2502.16982
ITERATIONS = 5
# x -> a x + b x^3 + c x^5, five times, moves singular values in (0.01, 1] to between 0.68 and 1.21.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def orthogonalize(matrices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return each matrix with singular values near 1:
    about U V^T of its singular value decomposition U S V^T.

    In float32, a matrix X that is at least twice as wide as high is multiplied twice only. With G =
    X X^T [R, R], each iteration is X <- Q X with Q = a I + b G + c G^2, so G <- Q G Q, and the
    product of all Q is multiplied with X last.

    Args:
        matrices: float32 [K, R, C] with R <= C; a matrix of zeros stays one.
        dtype: number format of the products.

    Returns:
        [K, R, C] in that format.
    """
    a, b, c = COEFFICIENTS
    x = (matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=1e-7)).to(dtype)
    if dtype == torch.float32 and x.shape[2] >= 2 * x.shape[1]:
        gram = x @ x.mT
        product = factor = _factor(gram)
        for _ in range(ITERATIONS - 1):
            gram = factor @ gram @ factor
            factor = _factor(gram)
            product = factor @ product
        return product @ x
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def _factor(gram: Tensor) -> Tensor:
    a, b, c = COEFFICIENTS
    factor = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    factor.diagonal(dim1=1, dim2=2).add_(a)
    return factor


def product_dtype(device: torch.device) -> torch.dtype:
    """Return bfloat16 if the device has hardware for its products, else float32."""
    fast = (
        device.type == "cuda"
        or torch.cpu._is_amx_tile_supported()
        or torch.cpu._is_avx512_bf16_supported()
    )
    return torch.bfloat16 if fast else torch.float32


def is_hidden_matrix(name: str, parameter: Tensor) -> bool:
    """Return whether Muon's own update applies: to the encoder's matrices,
    not to embeddings and heads.
    """
    return parameter.dim() == 2 and ".encoder." in name


class Muon(AdamW):
    """Muon; arguments as in `Adam`. `betas[0]` is also the momentum of the hidden matrices.

    The native implementation updates the other parameters only, the plain one all as in AdamW
    before it replaces the update of the hidden matrices.

    Attributes:
        exp_avg: float32 [n], AdamW's first moment, and the hidden matrices' momentum.
        exp_avg_sq: float32 [n], AdamW's second moment; without use for the hidden matrices.
    """

    name = "muon"
    CAN_SHARD = False  # orthogonalization needs whole matrices
    IMPLEMENTATIONS: ClassVar[tuple[str, ...]] = ("plain", "native")

    def __init__(self, flat: FlatParameters, layout: Layout, **settings: Any) -> None:
        self._product_dtype = product_dtype(flat.data.device)
        # Matrices of one shape are orthogonalized together, the tall ones transposed.
        self._groups: defaultdict[tuple[int, ...], list[str]] = defaultdict(list)
        for name, weight in flat.views(flat.data).items():
            if is_hidden_matrix(name, weight):
                self._groups[tuple(sorted(weight.shape))].append(name)
        super().__init__(flat, layout, **settings)

    def _load(self, form: str) -> None:
        hidden = {name for names in self._groups.values() for name in names}
        self._pieces = [
            piece for piece in self._pieces if self.flat.segments[piece.owner].name not in hidden
        ]
        super()._load(form)

    def _update(self, grad: Tensor, lr: float, scale: float) -> None:
        if self._native is not None:
            grads = self._views(grad * scale)
            momenta = self._views(self.exp_avg)
            weights = self._views(self.flat.data)
            for name in (name for names in self._groups.values() for name in names):
                momenta[name].lerp_(grads[name], 1.0 - self.betas[0])
            for name, direction in self._directions(grads):
                weights[name].mul_(1.0 - lr * self.weight_decay).sub_(direction, alpha=lr)
        super()._update(grad, lr, scale)

    def _direction(self, weight: Tensor, grad: Tensor) -> Tensor:
        update = super()._direction(weight, grad)
        updates = self._views(update)
        weights = self._views(weight)
        for name, direction in self._directions(self._views(grad)):
            torch.add(direction, weights[name], alpha=self.weight_decay, out=updates[name])
        return update

    def _views(self, buffer: Tensor) -> dict[str, Tensor]:
        return self.flat.views(buffer[: self.flat.numel])

    def _directions(self, grads: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the direction without decay, float32 [R, C], of each hidden matrix,
        from its new momentum and its clipped gradient.
        """
        momenta = self._views(self.exp_avg)
        for (_, largest), names in self._groups.items():
            ahead = [torch.lerp(grads[name], momenta[name], self.betas[0]) for name in names]
            wide = torch.stack([x.mT if x.shape[0] > x.shape[1] else x for x in ahead])
            for name, found, x in zip(
                names, orthogonalize(wide, self._product_dtype), ahead, strict=True
            ):
                direction = found.mT if x.shape[0] > x.shape[1] else found
                yield name, direction.float() * (ROOT_MEAN_SQUARE * largest**0.5)
