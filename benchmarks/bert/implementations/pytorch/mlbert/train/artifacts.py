"""What a finished run leaves behind: curve, weights with a model card, a Hugging Face copy, the summary."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from safetensors.torch import save_file

from mlbert.core.errors import UserError
from mlbert.core.rules import UNVERIFIED
from mlbert.models.bert import BertForPreTraining
from mlbert.models.huggingface import huggingface_config, to_huggingface


def write_curve(metrics: Path, target: Path) -> None:
    """Draws loss and accuracy over samples and over time from ``metrics.jsonl`` into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    points = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    steps = [p for p in points if p["kind"] == "step"]
    evaluations = [p for p in points if p["kind"] == "evaluation"]
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, x, label in zip(
        axes, ("samples", "seconds"), ("training samples", "seconds since run_start"), strict=True
    ):
        axis.plot([p[x] for p in steps], [p["loss"] for p in steps], color="tab:blue", linewidth=1)
        axis.set_xlabel(label)
        accuracy = axis.twinx()
        accuracy.plot(
            [p[x] for p in evaluations], [p["eval_accuracy"] for p in evaluations], color="tab:orange", marker="."
        )
        accuracy.set_ylim(bottom=0)
        accuracy.set_ylabel("masked-LM accuracy, evaluation set", color="tab:orange")
    axes[0].set_ylabel("training loss (masked LM + next sentence)", color="tab:blue")
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


def write_weights(model: BertForPreTraining, folder: Path, vocabulary: Path | None, card: dict[str, object]) -> None:
    """Writes ``weights/`` (safetensors, bert_config.json, README.md) and ``huggingface/`` into ``folder``.

    Both hold float32 parameters under Hugging Face's names; ``huggingface/`` loads with
    ``transformers.BertForPreTraining.from_pretrained``.
    """
    state = to_huggingface(model)
    own, peer = folder / "weights", folder / "huggingface"
    try:
        for target in (own, peer):
            target.mkdir(parents=True, exist_ok=True)
            save_file(state, target / "model.safetensors", metadata={"format": "pt"})
            if vocabulary is not None:
                shutil.copyfile(vocabulary, target / "vocab.txt")
        (own / "bert_config.json").write_text(model.config.to_json(), encoding="utf-8")
        text = json.dumps(huggingface_config(model.config), indent=2) + "\n"
        (peer / "config.json").write_text(text, encoding="utf-8")
        (peer / "tokenizer_config.json").write_text(
            json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True}, indent=2) + "\n", encoding="utf-8"
        )
        for target in (own, peer):
            (target / "README.md").write_text(_model_card(card), encoding="utf-8")
    except OSError as error:
        raise UserError(folder, f"cannot be written ({error.strerror})", "Free space or change LOGDIR") from None


def _model_card(card: dict[str, object]) -> str:
    lines = [
        "---",
        "library_name: transformers",
        "tags: [bert, masked-lm]",
        "---",
        "",
        "# BERT pre-trained by this run",
        "",
        "| what | value |",
        "|---|---|",
        *(f"| {name} | {value} |" for name, value in card.items()),
        "",
        "Input: uncased WordPiece tokens of `vocab.txt`. Heads: masked LM (decoder tied to the embeddings) and next",
        "sentence. The weights carry the biases of the text that they were trained on.",
        "",
        UNVERIFIED,
        "",
    ]
    return "\n".join(lines)
