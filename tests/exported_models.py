"""Compare what the commands of docs/models.md wrote with transformers, and print the largest
differences as JSON. Run with the Python of an environment in which the wheel is installed:

    python exported_models.py SOURCE OUT

SOURCE is a model, OUT the folder with what the commands wrote: see `model_table.commands`.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from onnxruntime import InferenceSession
from sentence_transformers import SentenceTransformer

import mlbert

LENGTHS = (12, 7)  # tokens of the two sequences
TEXTS = ["the quick fox is", "she said that it is not"]
CODE_OF_FOLDER = {"trust_remote_code": True}


def padded_inputs(pad: int) -> dict[str, torch.Tensor]:
    """Return token ids, which are ones of words in every tokenizer, and the mask: int64 [2, 12]."""
    is_token = torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]
    ids = torch.randint(5, 50, is_token.shape, generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids.where(is_token, pad), "attention_mask": is_token.long()}


def difference(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> float:
    """Return the largest difference at real tokens, or of vectors that sequences have."""
    apart = (found - expected).abs()
    return float((apart[mask.bool()] if apart.dim() == 3 else apart).max())


@torch.no_grad()
def differences(source: Path, out: Path) -> dict[str, float]:
    masked_lm = transformers.AutoModelForMaskedLM.from_pretrained(source, **CODE_OF_FOLDER).eval()
    inputs = padded_inputs(masked_lm.config.pad_token_id)
    mask = inputs["attention_mask"]
    expected = masked_lm(**inputs).logits
    own = mlbert.load_model(source).eval()
    found = {"load_model": difference(own(**inputs).logits, expected, mask)}

    converted = mlbert.load_model(out / "weights").eval()
    found["hf-to-torch"] = difference(converted(**inputs).logits, expected, mask)

    written = transformers.AutoModelForMaskedLM.from_pretrained(out / "written", **CODE_OF_FOLDER)
    found["--to huggingface"] = difference(written.eval()(**inputs).logits, expected, mask)

    session = InferenceSession(out / "onnx/model.onnx")
    names = {one.name for one in session.get_inputs()}
    arrays = {name: value.numpy() for name, value in inputs.items()}
    arrays["token_type_ids"] = np.zeros_like(arrays["input_ids"])
    (logits,) = session.run(["logits"], {name: arrays[name] for name in names})
    found["--to onnx"] = difference(torch.from_numpy(logits), expected, mask)

    embedder = SentenceTransformer(str(out / "embeddings"), device="cpu", **CODE_OF_FOLDER)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source, **CODE_OF_FOLDER)
    of_texts = tokenizer(TEXTS, padding=True, return_tensors="pt")
    is_token = of_texts["attention_mask"]
    hidden = masked_lm(**of_texts, output_hidden_states=True).hidden_states[-1]
    if hasattr(masked_lm, "model"):  # a ModernBERT has its last norm after the last of them
        hidden = masked_lm.model(**of_texts).last_hidden_state
    means = (hidden * is_token[..., None]).sum(1) / is_token.sum(1, keepdim=True)
    vectors = torch.from_numpy(embedder.encode(TEXTS))
    found["--to sentence-transformers"] = difference(vectors, means, is_token)

    for name, folder, kind in (
        ("finetune --from", out / "tuned/run_0/huggingface", "SequenceClassification"),
        ("pretrain --from", out / "longer/model", "MaskedLM"),
    ):
        automatic = getattr(transformers, f"AutoModelFor{kind}")
        theirs = automatic.from_pretrained(folder, **CODE_OF_FOLDER).eval()
        ours = mlbert.load_model(folder).eval()
        found[name] = difference(ours(**inputs).logits, theirs(**inputs).logits, mask)
    return found


if __name__ == "__main__":
    print(json.dumps(differences(Path(sys.argv[1]), Path(sys.argv[2]))))
