"""Guesses for [MASK]: those of transformers on the exported copy,
and a clear error for texts without an answer.
"""

from pathlib import Path

import pytest
import torch
import transformers
from tokenizers import BertWordPieceTokenizer

from mlbert.config.bert_config import BertConfig
from mlbert.models.bert import BertForMaskedLM
from mlbert.models.fill_mask import fill, open_masked_lm
from mlbert.models.weights.export import write_weights
from mlbert.models.weights.huggingface import huggingface_config
from same_weights import randomize
from user_errors import user_error

WORDS = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "the",
    "a",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "##s",
    ".",
]
SHAPE = BertConfig(len(WORDS), 32, 2, 2, 64, max_position_embeddings=16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    write_weights(randomize(BertForMaskedLM(SHAPE), 0.1), tmp_path, {}, tmp_path / "vocab.txt")
    return tmp_path


def assert_same_guesses(folder: Path, peer: Path, text: str) -> None:
    found = fill(*open_masked_lm(folder), text, top=5)
    expected = transformers.pipeline("fill-mask", model=str(peer), top_k=5)(text)
    assert [token for token, _ in found] == [guess["token_str"] for guess in expected]
    torch.testing.assert_close(
        [p for _, p in found], [guess["score"] for guess in expected], atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("name", ["huggingface", "weights", "."])
def test_guesses_are_those_of_transformers(folder, name):
    assert_same_guesses(folder / name, folder / "huggingface", "The cats [MASK] on the mat.")


@pytest.mark.parametrize("is_lower", [True, False])
def test_a_folder_that_transformers_saved_is_enough(tmp_path, is_lower):
    """It has a tokenizer.json and no vocab.txt."""
    (tmp_path / "vocab.txt").write_text("\n".join([*WORDS, "The"]) + "\n")
    fast = BertWordPieceTokenizer(str(tmp_path / "vocab.txt"), lowercase=is_lower)
    special = {"unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast._tokenizer, **special
    ).save_pretrained(tmp_path / "peer")
    config = transformers.BertConfig.from_dict(
        huggingface_config(SHAPE.with_options("vocab_size=15"))
    )
    transformers.BertForMaskedLM(config).save_pretrained(tmp_path / "peer")
    assert not (tmp_path / "peer/vocab.txt").exists()
    assert_same_guesses(tmp_path / "peer", tmp_path / "peer", "The the [MASK] sat .")


@pytest.mark.parametrize(
    ("text", "top", "code", "subject"),
    [
        *(
            (text, 5, "config.value", f"text '{text}'")
            for text in ("The cat sat.", "[MASK] [MASK]")
        ),
        ("cat " * 20 + "[MASK]", 5, "data.too-long", "text"),
        *(("[MASK]", top, "config.range", f"top {top}") for top in (0, 15)),
    ],
)
def test_questions_without_an_answer_are_reported(folder, text, top, code, subject):
    with user_error(code, subject):
        fill(*open_masked_lm(folder), text, top)


def test_a_folder_without_a_model_is_reported(folder, tmp_path):
    with user_error("file.missing", tmp_path / "none"):
        open_masked_lm(tmp_path / "none")
    with user_error("checkpoint.missing", Path(__file__).parent):
        open_masked_lm(Path(__file__).parent)
    (folder / "huggingface" / "vocab.txt").write_text("\n".join([*WORDS, "more"]) + "\n")
    with user_error("vocabulary.mismatch", folder / "huggingface/vocab.txt"):
        open_masked_lm(folder / "huggingface")
