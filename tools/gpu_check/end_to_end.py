"""Run ``mlbert train`` as a user does, in FP8 with the published configuration:
to its target, killed, and resumed.

The model learns the text in seconds, because each sequence repeats one word.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from gpu_check.published_step import exports
from gpu_check.rows import Row
from mlbert.config.bert_config import BertConfig
from mlbert.data.formats.prepared import ShardWriter
from mlbert.data.loading.synthetic import FIRST_WORD, sequences

PACKS = 1024
SEQUENCES = 2
LENGTH = 32
SUMMARY = ("steps", "samples", "accuracy", "status", "seconds_to_train")
POLL_SECONDS = 0.02
# Changes of the published configuration for a run that ends in seconds.
SETTINGS = {
    "SYNTH_DATA": "0",
    "LR": "0.004",
    "MAX_STEPS": "400",
    "WARMUP_STEPS": "10",
    "WARMUP_PROPORTION": "none",
    "OPT_LAMB_BETA_1": "0.9",
    "OPT_LAMB_BETA_2": "0.98",
    "WEIGHT_DECAY_RATE": "0.01",
    "TARGET_MLM_ACCURACY": "0.9",
    "NUM_EVAL_EXAMPLES": "128",
    "SAVE_CHECKPOINT_STEPS": "4",
    "LOG_FREQ": "1",
    "MLPERF_DIVISION": "open",
    "CPU_THREADS": "1",
}


@dataclass(frozen=True)
class EndToEnd:
    """The runs, which share data and settings.

    Attributes:
        shape: shape of the model.
        work: folder for data and runs.
        packs: packs per step.
        words: number of different words in the text.
        seconds: time limit of a run.
        graph: CUDA_GRAPH_MODE, or None for the configuration's.
    """

    shape: BertConfig
    work: Path
    packs: int
    words: int
    seconds: float = 60.0
    graph: str | None = None

    def rows(self) -> list[Row]:
        """Return the rows, each of which needs the previous ones."""
        return [
            ("mlbert train to its target", self.trained),
            ("mlbert train, killed behind a checkpoint", self.killed),
            ("mlbert train, resumed", self.resumed),
        ]

    def trained(self) -> dict[str, Any]:
        """Train without interruption, and check that the run reaches its target."""
        for name, seed in (("train", 1), ("eval", 2)):
            if not (self.work / name / "manifest.json").exists():
                write_set(self.work / name, self.shape.vocab_size, self.words, seed)
        return self._ended(self._start("whole"), "whole")

    def killed(self) -> dict[str, Any]:
        """Start a second run, and kill it when its first checkpoint is complete."""
        process = self._start("killed")
        folder = self.work / "killed" / "run_0" / "checkpoints"
        ends = time.monotonic() + self.seconds
        while (
            not list(folder.glob("step_*")) and process.poll() is None and time.monotonic() < ends
        ):
            time.sleep(POLL_SECONDS)
        was_running = process.poll() is None
        os.killpg(process.pid, signal.SIGKILL) if was_running else None
        process.wait()
        saved = sorted(path.name for path in folder.glob("step_*"))
        why = (
            ""
            if was_running and saved
            else f"the run had ended or saved nothing: {self._tail('killed')}"
        )
        return {"passed": not why, "checkpoints": len(saved), **({"why": why} if why else {})}

    def resumed(self) -> dict[str, Any]:
        """Resume the killed run, and check that its final weights equal those of the uninterrupted
        run.
        """
        row = self._ended(self._start("killed", RESUME="1"), "killed")
        if not row["passed"]:
            return row
        one, other = (load_file(self._weights(name)) for name in ("whole", "killed"))
        different = [name for name in one if not torch.equal(one[name], other[name])]
        why = (
            f"{len(different)} of {len(one)} tensors have other bits, such as {different[0]}"
            if different
            else ""
        )
        return {
            **row,
            "passed": not different,
            "different": len(different),
            **({"why": why} if why else {}),
        }

    def environment(self, name: str, **more: str) -> dict[str, str]:
        """Return the environment of a run."""
        samples = str(10 * self.packs * SEQUENCES)
        own = {
            "BATCHSIZE": str(self.packs),
            "LOGDIR": str(self.work / name),
            "EVAL_BATCH_SIZE": str(self.packs),
        }
        own |= {"DATADIR_PHASE2": str(self.work / "train"), "EVALDIR": str(self.work / "eval")}
        own |= {"EVAL_ITER_START_SAMPLES": samples, "EVAL_ITER_SAMPLES": samples}
        own |= {} if self.graph is None else {"CUDA_GRAPH_MODE": self.graph}
        return exports("fp8", self.work, {**SETTINGS, **own, **more}, self.shape)

    def _start(self, name: str, **more: str) -> subprocess.Popen[bytes]:
        options: dict[str, Any] = {"env": self.environment(name, **more), "start_new_session": True}
        with (self.work / f"{name}.txt").open("ab") as log:
            command = [sys.executable, "-m", "mlbert", "train"]
            return subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, **options)

    def _ended(self, process: subprocess.Popen[bytes], name: str) -> dict[str, Any]:
        """Wait for a run to end and return its summary."""
        try:
            code = process.wait(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            return {
                "passed": False,
                "why": f"it took longer than {self.seconds:.0f} s: {self._tail(name)}",
            }
        summary = self.work / name / "run_0" / "summary.json"
        if not summary.exists():
            return {"passed": False, "why": f"code {code}: {self._tail(name)}"}
        found = json.loads(summary.read_text(encoding="utf-8"))
        kept = {key: value for key, value in found.items() if key in SUMMARY}
        return {
            "passed": code == 0,
            **kept,
            **({} if code == 0 else {"why": f"code {code}: {self._tail(name)}"}),
        }

    def _weights(self, name: str) -> Path:
        return next((self.work / name / "run_0" / "weights").glob("*.safetensors"))

    def _tail(self, name: str) -> str:
        return (
            (self.work / f"{name}.txt")
            .read_text(errors="replace")
            .strip()[-300:]
            .replace("\n", " / ")
        )


def write_set(folder: Path, vocab_size: int, num_words: int, seed: int) -> None:
    """Write packs of sequences that repeat one word each."""
    generator = np.random.default_rng(seed)
    lengths = np.full(PACKS * SEQUENCES, LENGTH)
    bound = FIRST_WORD + num_words
    rows = sequences(lengths, bound, generator)
    words = generator.integers(FIRST_WORD, bound, len(lengths)).astype(np.uint16)
    tokens = np.where(rows.tokens >= FIRST_WORD, np.repeat(words, lengths), rows.tokens)
    rows = replace(
        rows, tokens=tokens, masked_labels=np.repeat(words, np.diff(rows.masked_offsets))
    )
    writer = ShardWriter(folder, 1, "gpu_check")
    writer.write_shard(0, rows, np.arange(0, len(lengths) + 1, SEQUENCES))
    writer.finish(
        vocabulary={"sha256": "0" * 64, "size": vocab_size},
        provenance={"seed": seed},
        packs={"max_tokens": SEQUENCES * LENGTH, "max_sequences": SEQUENCES},
        max_seq_length=LENGTH,
        max_predictions=LENGTH,
    )
