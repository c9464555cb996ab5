"""Copies of published systems with stand-ins for slow programs,
and small inputs for their commands.
"""

import dataclasses
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch

from mds_samples import write_mds
from mlbert.config.bert_config import BertConfig
from mlbert.data.prepare.split_bins import make_hdf5_bins
from mlbert.models.bert import BertForPreTraining
from mlbert.models.weights.checkpoint_names import VOCABULARY
from mlbert.models.weights.checkpoint_state import Report
from mlbert.models.weights.convert import ReadCheckpoint, torch_to_nvidia, write_own
from programs import run_quietly, user_environ, write_program
from stored_sets import VOCAB_SIZE, make_rows, random_lengths, write_set

HOME = Path("benchmarks/bert/implementations")
# Runs the remote command on this machine and records the host name.
SSH = 'echo "${*: -2:1}" >>"$NOTES"\nexec bash -c "${!#}"'
MPIRUN = 'printf "%s\\n" "$@" >"$NOTES"\nexit 3'


def tiny_bert(vocab_size: int) -> tuple[BertConfig, dict[str, torch.Tensor]]:
    """Return a tiny shape and its float32 parameters without the vocabulary padding."""
    shape = BertConfig(vocab_size, 16, 1, 2, 32, max_position_embeddings=32)
    model = BertForPreTraining(shape)
    model.initialize(5)
    state = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for name in VOCABULARY:
        state[name] = state[name][:vocab_size]
    return shape, state


def write_inputs(folder: Path) -> None:
    """Create HDF5 sets train/, eval/ and bins/, MDS sets in mds/,
    and the initial weights in own/ and phase1/.

    Masked labels are two, 19 to 1, in MDS and all equal in HDF5,
    so that two steps are enough to learn them.
    """
    for name, count in (("train", 400), ("eval", 64)):
        rows = make_rows(random_lengths(count))
        labels = np.where(np.arange(len(rows.masked_labels)) % 20, 7, 8).astype(np.uint16)
        write_mds(folder / "mds" / name, dataclasses.replace(rows, masked_labels=labels))
        labels = np.full_like(rows.masked_labels, 7)
        write_set(folder / name, dataclasses.replace(rows, masked_labels=labels))
    make_hdf5_bins(folder / "train", folder / "bins", edges=(8, 16, 24, 32))
    write_own(ReadCheckpoint(*tiny_bert(VOCAB_SIZE), Report(), folder), folder / "own")
    torch_to_nvidia(folder / "own", folder / "phase1/model.ckpt-28252.pt")
    shutil.copy2(folder / "own/bert_config.json", folder / "phase1")


class System:
    """Copies of systems' folders below a path with a space, and stand-ins for programs,
    first in PATH.

    Args:
        root: folder for the copies, the stand-ins, and the notes that they write.
        tree_root: the repository.
        names: of the systems; commands run in the folder of the first.
        python: the interpreter behind `python` and `mlbert`.
    """

    def __init__(
        self, root: Path, tree_root: Path, *names: str, python: str | Path = sys.executable
    ) -> None:
        home = root / "a tree" / HOME
        for name in names:
            shutil.copytree(tree_root / HOME / name, home / name)
        (home / "pytorch").symlink_to(tree_root / HOME / "pytorch")
        self.root = root
        self.folder = home / names[0]
        self.programs = root / "bin"
        self.notes = root / "notes"
        self.exports = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PYTHONPATH": home / "pytorch",
            "NOTES": self.notes,
        }
        texts = {
            "python": f'exec "{python}" "$@"',
            "mlbert": f'exec "{python}" -m mlbert "$@"',
            "ssh": SSH,
            "mpirun": MPIRUN,
        }
        for program, text in texts.items():
            write_program(self.programs / program, f"#!/bin/bash\n{text}\n")

    def run(self, *words: object, **exports: object) -> subprocess.CompletedProcess[str]:
        """Run a command in the first folder."""
        exports = self.exports | exports
        return run_quietly(*words, cwd=self.folder, env=user_environ(**exports))

    def type(self, line: str, **exports: object) -> subprocess.CompletedProcess[str]:
        return self.run("bash", "-c", line, **exports)
