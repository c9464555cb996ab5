"""Write small valid inputs for `tools/fuzz.py`, in every format that the project reads.

The project and helpers of its tests write them. A command is the arguments of ``mlbert``, with {in}
for the input folder and {out} for a new folder.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TESTS = ROOT / "tests"
sys.path.insert(0, str(TESTS))

_NOUNS = (
    "river",
    "engine",
    "garden",
    "letter",
    "window",
    "market",
    "teacher",
    "forest",
    "bridge",
    "kitchen",
)
_VERBS = ("holds", "crosses", "follows", "paints", "opens", "finds", "carries", "measures")
_SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 32,
}
_SETTINGS = {
    "recipe": "packed_lamb",
    "input_dir": "{in}/data/train",
    "eval_dir": "{in}/data/eval",
    "output_dir": "{in}/out",
    "bert_config_file": "{in}/bert_config.json",
    "train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "average_packing_rate": 1,
    "learning_rate": 0.01,
    "max_steps": 4,
    "max_samples_termination": 10_000,
    "opt_lamb_beta_1": 0.9,
    "opt_lamb_beta_2": 0.98,
    "weight_decay_rate": 0.01,
    "eval_iter_start_samples": 8,
    "eval_iter_samples": 8,
    "num_eval_examples": 16,
    "eval_batch_size": 8,
    "target_mlm_accuracy": 0.999,
    "seed": 5,
    "cpu_threads": 1,
    "precision": "fp32",
    "ops": "plain",
    "log_freq": 1,
    "save_checkpoint_steps": 2,
    "keep_checkpoints": 2,
    "submission_org": "test",
    "submission_platform": "test",
    "submission_division": "open",
}
_SET_OPTIONS = (
    "--workers 1 --max-seq-length 32 --vocab-size 200 --dupe-factor 1 --one-per-line "
    "--eval-sequences 16"
)
MAKE_SET = f"prepare text --input {{in}}/text --out {{in}}/data {_SET_OPTIONS}"

Mlbert = Callable[[str], None]  # runs a command; raises if it fails


@dataclass(frozen=True)
class Format:
    """One format.

    Attributes:
        make: writes valid inputs below a folder, and may run ``mlbert`` commands for that.
        damaged: patterns of the files to damage.
        commands: commands that read them, one per line.
        quick: whether a case takes only a fraction of a second.
    """

    make: Callable[[Path, Mlbert], None]
    damaged: Sequence[str]
    commands: str
    quick: bool = True

    def files(self, folder: Path) -> list[Path]:
        """Return the files to damage below a folder."""
        return sorted(
            {path for pattern in self.damaged for path in folder.glob(pattern) if path.is_file()}
        )


def train_words(**changes: object) -> str:
    """Return the arguments of ``mlbert train`` for four steps of a tiny model."""
    settings = {**_SETTINGS, **changes}
    return "train " + " ".join(
        f"--{name} {value}" for name, value in settings.items() if value is not None
    )


def write_logs(folder: Path, mlbert: Mlbert) -> None:
    from simple_logs import write_log

    for index in range(3):
        write_log(
            folder / f"logs/result_{index}.txt",
            [(100, 9, 0.5), (200, 20 + index, 0.73)],
            logged={"seed": index},
        )
    shutil.copytree(
        TESTS / "assets/own_tree/results/cpu_demo/bert", folder / "own", dirs_exist_ok=True
    )


def write_run_folder(folder: Path, mlbert: Mlbert) -> None:
    write_stored_set(folder, mlbert)
    mlbert(train_words())
    shutil.copytree(folder / "data", folder / "out/data")


def write_interrupted_run(folder: Path, mlbert: Mlbert) -> None:
    """Write a run that was killed after its second checkpoint."""
    write_run_folder(folder, mlbert)
    run = folder / "out/run_0"
    log = folder / "out/result_0.txt"
    (run / "summary.json").unlink()
    shutil.rmtree(run / "weights")
    shutil.rmtree(run / "huggingface")
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"run_stop"' not in line), encoding="utf-8")


def write_submission_tree(folder: Path, mlbert: Mlbert) -> None:
    shutil.copytree(TESTS / "assets/own_tree", folder / "tree")
    for index in range(3, 10):
        (folder / f"tree/results/cpu_demo/bert/result_{index}.txt").unlink(missing_ok=True)


def write_stored_set(folder: Path, mlbert: Mlbert) -> None:
    lines = (
        f"The {a} {verb} the {b} at noon."
        for a in _NOUNS
        for verb in _VERBS
        for b in _NOUNS
        if a != b
    )
    (folder / "text").mkdir()
    text = "\n".join(f"{line}\n" if index % 6 == 5 else line for index, line in enumerate(lines))
    (folder / "text/part.txt").write_text(text, encoding="utf-8")
    mlbert(MAKE_SET)
    size = len((folder / "data/vocab.txt").read_text(encoding="utf-8").splitlines())
    (folder / "bert_config.json").write_text(json.dumps({**_SHAPE, "vocab_size": size}))


def write_packed_set(folder: Path, mlbert: Mlbert) -> None:
    write_stored_set(folder, mlbert)
    mlbert("prepare pack --input {in}/data/train --out {in}/packed --workers 1")


def write_tfrecords(folder: Path, mlbert: Mlbert) -> None:
    write_stored_set(folder, mlbert)
    mlbert("prepare hdf5-to-tfrecord --input {in}/data/train --out {in}/records --workers 1")


def write_hdf5_shards(folder: Path, mlbert: Mlbert) -> None:
    import nvidia_shards as shards

    rows = shards.bert_rows(40)
    for name in ("fixed", "variable", "packed"):
        (folder / name).mkdir(parents=True)
    shards.write_fixed(folder / "fixed/part_00000.hdf5", rows)
    shards.write_variable(folder / "variable/part_00000.hdf5", rows)
    shards.write_packed(folder / "packed/part_00000.hdf5", rows, shards.pack_counts(40))
    shards.write_vocabulary(folder / "vocab.txt")


def write_mds_sets(folder: Path, mlbert: Mlbert) -> None:
    import mds_samples
    import nvidia_shards as shards
    from mosaic_texts import make_texts

    rows = shards.bert_rows(60, max_length=32)
    mds_samples.write_mds(folder / "plain", rows, predictions=6)
    mds_samples.write_mds(folder / "zstd", rows, predictions=6, compression="zstd")
    shards.write_vocabulary(folder / "vocab.txt")
    (folder / "texts").mkdir()
    make_texts(folder / "texts", ROOT)


def write_hugging_face_model(folder: Path, mlbert: Mlbert) -> None:
    write_run_folder(folder, mlbert)
    shutil.copytree(folder / "out/run_0/huggingface", folder / "hf")
    mlbert("convert torch-to-nvidia {in}/out/run_0/weights {in}/nvidia.pt")
    mlbert("convert torch-to-composer {in}/out/run_0/weights {in}/composer.pt")


def write_task(folder: Path, mlbert: Mlbert) -> None:
    write_hugging_face_model(folder, mlbert)
    rows = [
        (f"{a} {b}", index % 2) for index, (a, b) in enumerate(itertools.product(_NOUNS, _VERBS))
    ]
    (folder / "train.csv").write_text(
        "text,label\n" + "".join(f'"{text}",{label}\n' for text, label in rows)
    )
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows[:20]]
    (folder / "eval.jsonl").write_text("\n".join(lines) + "\n")
    text = (ROOT / "benchmarks/mosaic_bert/yamls/test/sequence_classification.yaml").read_text(
        encoding="utf-8"
    )
    start, _, rest = text.partition("data:\n")
    rest = rest.partition("max_seq_len: ")[2]
    data = (
        "data:\n  train: {in}/train.csv\n  eval: {in}/eval.jsonl\n\nmax_seq_len: 32\n"
        + rest.partition("\n")[2]
    )
    text = (
        (start + data)
        .replace("prajjwal1/bert-tiny", "{in}/hf")
        .replace("60ba", "2ba")
        .replace("30ba", "2ba")
    )
    text = text.replace(
        "pretrained_model_name: ${tokenizer_name}", "pretrained_model_name: {in}/bert_config.json"
    )
    (folder / "task.yaml").write_text(
        text.replace("{in}", "in").replace("num_workers: 4", "num_workers: 0")
    )


def write_yaml(folder: Path, mlbert: Mlbert) -> None:
    from mosaic_texts import make_texts

    make_texts(folder, ROOT)
    (folder / "bert_config.json").write_text(json.dumps({**_SHAPE, "vocab_size": 200}))
    lines = [
        f"{name}: {value}".replace("{in}", "in")
        for name, value in _SETTINGS.items()
        if name != "seed"
    ]
    (folder / "parent.yaml").write_text("\n".join(lines) + "\n")
    (folder / "run.yaml").write_text("extends: parent.yaml\nseed: 3\nsynthetic_data: 1\n")
