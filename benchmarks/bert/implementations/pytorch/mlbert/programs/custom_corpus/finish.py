"""What a finished run leaves for its owner: the model, masked sentences with guesses, the page."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlbert.data.prepare.masked_sentences import MaskedSentence
from mlbert.data.prepare.own_text import Facts
from mlbert.host.errors import UserError
from mlbert.models.fill_mask import MASK, fill, open_masked_lm
from mlbert.models.weights.files import new_path
from mlbert.programs.console_progress import short_duration
from mlbert.programs.custom_corpus.folder import OwnFolder
from mlbert.programs.output import write_page
from mlbert.report.own_text import own_text_page

TOP = 5


@dataclass(frozen=True)
class Guessed:
    """A masked sentence and what the model puts there, most probable first."""

    sentence: MaskedSentence
    guesses: Sequence[tuple[str, float]]

    def told(self) -> str:
        """The guesses with their probabilities."""
        return ", ".join(f"{token} {probability:.2f}" for token, probability in self.guesses)


def take_model(folder: OwnFolder) -> None:
    """Makes DIR/model of what the run has written; an older one is replaced. Raises UserError: it cannot be
    written."""
    written = next(path for name in ("huggingface", "weights") if (path := folder.run / name).is_dir())
    with new_path(folder.model) as place:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        for file in written.iterdir():
            shutil.copyfile(file, place / file.name)
        shutil.rmtree(folder.model, ignore_errors=True)
    (folder.path / "latest-rank0.pt").unlink(missing_ok=True)  # Composer's form of the same weights


def guess(folder: OwnFolder, facts: Facts) -> list[Guessed]:
    """The model's guesses for the masked sentences of the held-out text; too long ones are left out."""
    model, tokenizer = open_masked_lm(folder.model)
    found = []
    for sentence in (MaskedSentence(*one) for one in facts.sentences):
        try:
            found.append(Guessed(sentence, fill(model, tokenizer, sentence.text, TOP)))
        except UserError:
            continue
    return found


def write_report(folder: OwnFolder, facts: Facts, summary: dict[str, Any], guessed: Sequence[Guessed]) -> None:
    """Writes DIR/report.html. Raises UserError: it cannot be written."""
    shape = json.loads(folder.shape.read_text(encoding="utf-8"))
    layers, hidden = shape["num_hidden_layers"], shape["hidden_size"]
    bigram = facts.baselines["bigram_accuracy"]
    values = {
        "text": f"{facts.characters:,} characters, {facts.documents:,} documents",
        "training": f"{facts.train_tokens:,} tokens in {facts.train_sequences:,} sequences",
        "held out": f"{facts.held_out_tokens:,} tokens of whole documents",
        "left out, nearly repeats held-out text": f"{facts.near_repeats:,} tokens",
        "passes over the text": f"{summary['tokens'] / max(1, facts.train_tokens):.1f}",
        **{name: summary[name] for name in ("steps", "tokens", "tokens_per_second", "seed")},
        **{name: value for name, value in shape.items() if name != "architectures"},
    }
    page = own_text_page(
        folder.path.resolve().name,
        (f"{summary['accuracy']:.1%}", "of the masked tokens of held-out text are guessed"),
        [
            (f"{bigram:.1%}", "guessing from one neighbour"),
            (f"{facts.baselines['most_frequent_accuracy']:.1%}", "always the most frequent token"),
            (f"{layers} x {hidden}", "layers x hidden size"),
            (short_duration(summary["seconds_to_train"]), "of training"),
        ],
        folder.run / "metrics.jsonl",
        {"bigram": bigram, "most frequent token": facts.baselines["most_frequent_accuracy"]},
        [[one.sentence.text.replace(MASK, "▁▁▁"), one.sentence.answer, one.told()] for one in guessed],
        values,
    )
    write_page(folder.report, page)


def next_commands(model: Path) -> list[str]:
    """What to type now."""
    return [
        f'mlbert fill-mask {model} "Write a sentence with one {MASK} in it."',
        f"mlbert finetune YAML load_path={model} data.train=FILE data.eval=FILE",
    ]
