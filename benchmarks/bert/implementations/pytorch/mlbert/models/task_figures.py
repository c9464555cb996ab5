"""Figures of a fine-tuned model's predictions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mlbert.host.texts import shortened

_MOST_NAMES = 40  # classes whose names fit the axes
_LONGEST_NAME = 24  # characters
_DPI = 110


def draw_confusion_matrix(path: Path, counts: np.ndarray, classes: Sequence[str]) -> None:
    """Draw int64 [L, L], rows with label i that are predicted as j, as a PNG.

    The classes are numbered if the font lacks a character of a name: the report has the names.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    image = axes.imshow(share, vmin=0, vmax=1, cmap="Blues")
    figure.colorbar(image, label="share of the label's rows")
    if len(classes) <= _MOST_NAMES:
        places = range(len(classes))
        names = _drawable(classes)
        axes.set_xticks(places, names, rotation=45, ha="right", parse_math=False)
        axes.set_yticks(places, names, parse_math=False)
        for i, j in np.ndindex(counts.shape):
            color = "white" if share[i, j] > 0.5 else "black"
            axes.text(j, i, str(counts[i, j]), ha="center", va="center", color=color)
    axes.set(xlabel="prediction", ylabel="label")
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def draw_numbers(path: Path, predicted: np.ndarray, labels: np.ndarray) -> None:
    """Draw predicted numbers over labels, float64 [N] each, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 5), layout="constrained")
    axes.plot(labels, predicted, ".", markersize=4)
    axes.set(xlabel="label", ylabel="prediction")
    figure.savefig(path, dpi=_DPI)
    pyplot.close(figure)


def _drawable(names: Sequence[str]) -> list[str]:
    """Return the names, shortened, or numbers from 1 if the default font lacks a character."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    font = get_font(findfont(FontProperties()))
    characters = {character for name in names for character in name}
    if all(font.get_char_index(ord(character)) for character in characters):
        return [shortened(name, _LONGEST_NAME) for name in names]
    return [str(number) for number in range(1, len(names) + 1)]
