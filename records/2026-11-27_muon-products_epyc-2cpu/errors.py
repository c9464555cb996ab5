"""Errors of orthogonalized matrices against the singular value decomposition in float64: nearly singular, wide ones."""

import torch
from pairs import each_iteration

from mlbert.optim import muon


def iterated(values):
    a, b, c = muon.COEFFICIENTS
    for _ in range(muon.ITERATIONS):
        values = a * values + b * values**3 + c * values**5
    return values


generator = torch.Generator().manual_seed(0)
for rows, columns in ((24, 96), (384, 1024), (384, 2048)):
    for rank in (1, 3, 24):
        for noise in (0, 1e-6, 1e-4, 1e-2):
            left, right = (torch.randn(1, *shape, generator=generator) for shape in ((rows, rank), (rank, columns)))
            matrix = left @ right + noise * torch.randn(1, rows, columns, generator=generator)
            u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
            expected = u @ (iterated(values / values.norm(dim=-1, keepdim=True)).unsqueeze(-1) * v)
            found = [form(matrix, torch.float32).double() for form in (each_iteration, muon.orthogonalize)]
            errors = [float((x - expected).norm() / expected.norm()) for x in found]
            print(rows, columns, rank, noise, "each iteration {:.1e} twice {:.1e}".format(*errors))
