"""One call of ``mlbert pretrain TEXT``: what is asked for and what the folder holds, the text, training, the end.

What a finished run leaves for its owner: the model, masked sentences with guesses, the page.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rich.console import Console

from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.tokenizer import Tokenizer, load_tokenizer
from mlbert.data.prepare.corpus_files import CorpusSource, find_sources
from mlbert.data.prepare.custom_corpus import Facts, MaskedSentence, Request, prepare
from mlbert.distributed.lifecycle import BY_SIGNAL, FAILED, SUCCEEDED, SUCCESS, Terminated
from mlbert.distributed.world import World
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from mlbert.host.files import write_atomically
from mlbert.models.fill_mask import MASK, fill, open_masked_lm
from mlbert.models.weights.files import new_path
from mlbert.programs.console import console_progress, short_duration, write_page
from mlbert.programs.custom_corpus.display import Display
from mlbert.programs.custom_corpus.plan import CorpusPlan, OwnFolder, make_plan, pace_of, resolve_settings
from mlbert.programs.pretrain_rules import EVAL_MASK_RATE
from mlbert.report.custom_corpus import own_text_page
from mlbert.training.config import RunConfig
from mlbert.training.experiment import RunOptions, run_experiment

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


AUTO = "auto"


@dataclass(frozen=True)
class Asked:
    """The words of a call.

    Attributes:
        texts, out: paths of text, and of the run's folder.
        seconds: of training in all.
        size: a name of `mlbert.programs.pretrain_rules.SIZES`, or `AUTO`.
        vocab: a vocabulary to take.
        cased: a vocabulary that is trained keeps capital letters and accents.
        start: weights to go on from.
        mlperf: write a log.
    """

    texts: list[Path]
    out: Path
    seconds: float
    size: str
    vocab: Path | None
    cased: bool
    start: Path | None
    mlperf: bool

    @property
    def command(self) -> str:
        """All but the time, to be typed."""
        given = {"--size": None if self.size == AUTO else self.size, "--vocab": self.vocab, "--from": self.start}
        options = [str(word) for name, value in given.items() if value is not None for word in (name, value)]
        cased = ["--cased"] if self.cased else []
        return shlex.join(["mlbert", "pretrain", *map(str, self.texts), "--out", str(self.out), *options, *cased])


def pretrain(asked: Asked) -> int:
    """Does all of it; returns the exit status."""
    world = World.identify(environment())
    if world.world_size > 1:
        raise UserError(
            "command.launcher", "mlbert pretrain TEXT", "runs as one process", "Start it without a launcher"
        )
    folder = OwnFolder(asked.out)
    with folder.held():
        return _Run(folder, Console(), asked).go(world)


class _Run:
    """One call of the command."""

    def __init__(self, folder: OwnFolder, console: Console, asked: Asked) -> None:
        self._folder, self._console, self._words = folder, console, asked
        self._seconds = asked.seconds
        self._sources: list[CorpusSource] = find_sources(asked.texts, folder.path)
        self._vocabulary: Tokenizer | None = None
        self._start: tuple[Path, BertConfig] | None = None
        if asked.start is not None:
            model, self._vocabulary = open_masked_lm(asked.start)
            self._start = asked.start, model.config
        elif asked.vocab is not None:
            self._vocabulary = load_tokenizer(asked.vocab)

    def go(self, world: World) -> int:
        """All of it; returns the exit status."""
        notes, summary = self._folder.remembered(), self._folder.finished()
        if notes is not None:
            self._compare(notes["asked"])
        if summary is not None and (trained := float(summary["seconds_to_train"])) >= 0.98 * self._seconds:
            if not self._folder.report.exists():  # the last call was interrupted while it wrote the model
                self._finish(self._prepare(self._plan(notes)))
            self._say(f"{self._folder.path} is finished: trained for {short_duration(trained)}")
            self._say(f"To train it longer: {self._words.command} --minutes {2 * trained / 60:.3g}")
            return SUCCEEDED
        plan = self._plan(notes)
        facts = self._prepare(plan)
        self._write_shape(plan)
        resume = self._folder.has_checkpoint()
        if summary is not None and not resume:
            raise UserError(
                "checkpoint.missing",
                self._folder.run,
                "its checkpoints are gone: it cannot be made longer",
                "Choose another --out",
            )
        if resume:
            state = "is finished and is made longer" if summary is not None else "was interrupted"
            self._say(f"{self._folder.path} {state}: going on from its newest checkpoint")
        elif notes is not None:
            self._say("no checkpoint was saved before: training begins anew")
            self._folder.log.unlink(missing_ok=True)
        for path in (self._folder.summary, self._folder.report):
            path.unlink(missing_ok=True)
        return self._train(plan, facts, resume, world)

    def _asked(self) -> dict[str, Any]:
        sources = [source.identity for source in self._sources]
        vocabulary = self._vocabulary.identity if self._vocabulary else None
        start = str(self._start[0].resolve()) if self._start else None
        return {
            "sources": sources,
            "--size": self._words.size,
            "--vocab": vocabulary,
            "--cased": self._words.cased,
            "--from": start,
        }

    def _compare(self, before: dict[str, Any]) -> None:
        """Raises UserError: the folder's run was asked for with something else."""
        now = self._asked()
        for name, value in now.items():
            if before.get(name) != value:
                what = "other text, or the text has changed since" if name == "sources" else f"another {name}"
                raise UserError(
                    "run.other-settings",
                    self._folder.path,
                    f"holds a run with {what}",
                    "Choose another --out, or remove it",
                )

    def _plan(self, notes: dict[str, Any] | None) -> CorpusPlan:
        """The plan of the first call, which later ones keep to."""
        if notes is not None:
            try:
                return CorpusPlan(**notes["settings"])
            except TypeError:
                raise UserError(
                    "run.damaged", self._folder.path, "its pretrain.json is damaged", "Remove it to start anew"
                ) from None
        num_bytes = sum(source.num_bytes for source in self._sources)
        plan = make_plan(num_bytes, self._seconds, self._words.size, self._start)
        self._folder.remember({"asked": self._asked(), "settings": asdict(plan)})
        return plan

    def _prepare(self, plan: CorpusPlan) -> Facts:
        request = Request(
            self._sources, self._vocabulary, plan.vocab_size, not self._words.cased, plan.length, EVAL_MASK_RATE
        )
        facts = prepare(request, self._folder.text, console_progress(self._console))
        self._say(
            f"text: {facts.characters:,} characters; {facts.train_tokens:,} tokens to train on, "
            f"{facts.held_out_tokens:,} held out"
        )
        if facts.near_repeats > 0.1 * facts.train_tokens:
            self._say(f"warning: {facts.near_repeats:,} tokens nearly repeat held-out text and are left out")
        if facts.unknown_share > 0.05:
            self._say(f"warning: {facts.unknown_share:.0%} of the words are [UNK] to this vocabulary")
        return facts

    def _write_shape(self, plan: CorpusPlan) -> None:
        entries = len(load_tokenizer(self._folder.text).vocabulary)
        shape = BertConfig(**{**plan.shape, "vocab_size": entries})
        write_atomically(self._folder.shape, shape.to_json())
        what = "going on from a model" if self._start else "new model"
        self._say(
            f"{what}: {shape.num_hidden_layers} layers x {shape.hidden_size}, {entries:,} entries, "
            f"{shape.num_parameters / 1e6:.1f} M parameters; {short_duration(self._seconds)} of training"
        )

    def _train(self, plan: CorpusPlan, facts: Facts, resume: bool, world: World) -> int:
        resolved = resolve_settings(self._folder, plan.settings, self._seconds, facts.train_sequences, resume)
        display = Display(self._console, self._seconds, facts.baselines, resolved.config[RunConfig].log_freq)
        manner = RunOptions(pace_of(self._seconds, plan), display, self._words.mlperf)
        try:
            with _signals_save():
                outcome = run_experiment(resolved, world, self._console, manner)
        except Terminated as end:
            display.close()
            return self._interrupted(end)
        finally:
            display.close()
        if outcome.status != SUCCESS:
            self._say(f"stopped: {outcome.reason}")
            return FAILED
        self._finish(facts)
        return SUCCEEDED

    def _interrupted(self, end: Terminated) -> int:
        saved = "a checkpoint is saved" if self._folder.has_checkpoint() else "nothing was trained yet"
        self._say(f"interrupted: {saved}. The same command goes on.")
        return BY_SIGNAL + (_caught[0] if _caught else end.signum)

    def _finish(self, facts: Facts) -> None:
        folder, summary = self._folder, self._folder.finished()
        assert summary is not None, "the run has come to its end"
        take_model(folder)
        guessed = guess(folder, facts)
        write_report(folder, facts, summary, guessed)
        accuracy, bigram = summary["accuracy"], facts.baselines["bigram_accuracy"]
        if guessed:
            self._say("\nheld-out sentences, the word that stood there, and the model's guesses:")
        for one in guessed:
            self._say(f"  {one.sentence.text}\n    {one.sentence.answer}: {one.told()}")
        self._say(
            f"\nfinished: held-out accuracy {accuracy:.4f} after {short_duration(summary['seconds_to_train'])} "
            f"(from one neighbour {bigram:.4f}, the most frequent token "
            f"{facts.baselines['most_frequent_accuracy']:.4f})"
        )
        self._say(f"model:  {folder.model}\nreport: {folder.report}\nnext:")
        for command in next_commands(folder.model):
            self._say(f"  {command}")

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


_caught: list[int] = []


@contextmanager
def _signals_save() -> Iterator[None]:
    """Ctrl-C and SIGTERM have the run write a checkpoint and leave; a second one ends it at once."""

    def ask(signum: int, _: FrameType | None) -> None:
        signal.signal(signum, before[signal.Signals(signum)])
        if signal.getsignal(signal.SIGUSR1) in (signal.SIG_DFL, signal.SIG_IGN):
            raise KeyboardInterrupt  # nobody listens yet, or any more
        _caught.append(signum)
        os.kill(os.getpid(), signal.SIGUSR1)

    before = {signum: signal.signal(signum, ask) for signum in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
