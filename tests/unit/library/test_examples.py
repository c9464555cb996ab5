"""The examples of docs/own_loop.md run as they are."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import transformers

from mlbert.models.fill_mask import fill, open_masked_lm


def example(tree_root: Path, name: str) -> dict[str, Any]:
    return runpy.run_path(str(tree_root / "docs/examples" / name))


def test_own_loop_continues_where_it_was_stopped(
    tree_root: Path, pretrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = example(tree_root, "own_loop.py")["main"]
    whole = main(pretrained, tmp_path / "whole", 12, 0)
    assert whole[-1] < whole[0]
    first = main(pretrained, tmp_path / "parts", 7, 2)
    rest = main(pretrained, tmp_path / "parts", 12, 1)
    assert first + rest == whole
    assert "held-out loss" in capsys.readouterr().out
    model, tokenizer = open_masked_lm(tmp_path / "whole/model")
    assert fill(model, tokenizer, "the old [MASK]")
    folder = tmp_path / "whole/model"
    assert transformers.AutoModelForMaskedLM.from_pretrained(folder)
    assert transformers.AutoTokenizer.from_pretrained(folder)("the old river")["input_ids"]


def test_loop_with_transformers(tree_root: Path, pretrained: Path) -> None:
    losses = example(tree_root, "own_loop_transformers.py")["main"](pretrained, 8)
    assert losses[-1] < losses[0]
