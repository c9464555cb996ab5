"""Create small valid inputs for `tools/fuzz.py` in every format that the project reads, with commands that read them.

The project and helpers of its tests write the inputs. A command is the arguments of ``mlbert``, with {in} for the input
folder and {out} for a new folder.
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
_SET = (
    "prepare text --input {in}/text --out {in}/data --workers 1 --max-seq-length 32 --vocab-size 200 --dupe-factor 1 "
    "--one-per-line --eval-sequences 16"
)
_TO_HDF5 = "prepare tfrecord-to-hdf5 --input {in}/records --vocab {in}/data/vocab.txt --out {out}/x --workers 1"
_IMPORT = "prepare import --vocab {in}/vocab.txt --out {out}/x --workers 1"
_PRETRAIN = "max_seq_len=24 max_duration=1ba eval_interval=1ba save_folder={out}/run"
_TEXTS = "tokenizer_name={in}/texts/vocab.txt"
_WEIGHTS = "--init_checkpoint {in}/out/run_0/weights/model.safetensors"
_ALL = "--workers 1 --out {out}/x"

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


def _logs(folder: Path, mlbert: Mlbert) -> None:
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


def _run_folder(folder: Path, mlbert: Mlbert) -> None:
    _set(folder, mlbert)
    mlbert(train_words())
    shutil.copytree(folder / "data", folder / "out/data")


def _interrupted(folder: Path, mlbert: Mlbert) -> None:
    """Write a run that was killed after its second checkpoint."""
    _run_folder(folder, mlbert)
    run = folder / "out/run_0"
    log = folder / "out/result_0.txt"
    (run / "summary.json").unlink()
    shutil.rmtree(run / "weights")
    shutil.rmtree(run / "huggingface")
    lines = log.read_text(encoding="utf-8").splitlines(keepends=True)
    log.write_text("".join(line for line in lines if '"run_stop"' not in line), encoding="utf-8")


def _tree(folder: Path, mlbert: Mlbert) -> None:
    shutil.copytree(TESTS / "assets/own_tree", folder / "tree")
    for index in range(3, 10):
        (folder / f"tree/results/cpu_demo/bert/result_{index}.txt").unlink(missing_ok=True)


def _set(folder: Path, mlbert: Mlbert) -> None:
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
    mlbert(_SET)
    size = len((folder / "data/vocab.txt").read_text(encoding="utf-8").splitlines())
    (folder / "bert_config.json").write_text(json.dumps({**_SHAPE, "vocab_size": size}))


def _packed(folder: Path, mlbert: Mlbert) -> None:
    _set(folder, mlbert)
    mlbert("prepare pack --input {in}/data/train --out {in}/packed --workers 1")


def _tfrecords(folder: Path, mlbert: Mlbert) -> None:
    _set(folder, mlbert)
    mlbert("prepare hdf5-to-tfrecord --input {in}/data/train --out {in}/records --workers 1")


def _hdf5(folder: Path, mlbert: Mlbert) -> None:
    import nvidia_shards as shards

    rows = shards.bert_rows(40)
    for name in ("fixed", "variable", "packed"):
        (folder / name).mkdir(parents=True)
    shards.write_fixed(folder / "fixed/part_00000.hdf5", rows)
    shards.write_variable(folder / "variable/part_00000.hdf5", rows)
    shards.write_packed(folder / "packed/part_00000.hdf5", rows, shards.pack_counts(40))
    shards.write_vocabulary(folder / "vocab.txt")


def _mds(folder: Path, mlbert: Mlbert) -> None:
    import mds_samples
    import nvidia_shards as shards
    from mosaic_texts import make_texts

    rows = shards.bert_rows(60, max_length=32)
    mds_samples.write_mds(folder / "plain", rows, predictions=6)
    mds_samples.write_mds(folder / "zstd", rows, predictions=6, compression="zstd")
    shards.write_vocabulary(folder / "vocab.txt")
    (folder / "texts").mkdir()
    make_texts(folder / "texts", ROOT)


def _hugging_face(folder: Path, mlbert: Mlbert) -> None:
    _run_folder(folder, mlbert)
    shutil.copytree(folder / "out/run_0/huggingface", folder / "hf")
    mlbert("convert torch-to-nvidia {in}/out/run_0/weights {in}/nvidia.pt")
    mlbert("convert torch-to-composer {in}/out/run_0/weights {in}/composer.pt")


def _tasks(folder: Path, mlbert: Mlbert) -> None:
    _hugging_face(folder, mlbert)
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


def _yaml(folder: Path, mlbert: Mlbert) -> None:
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


_SHORT = train_words(output_dir="{out}/run", max_steps=1)
FORMATS = {
    "log": Format(
        _logs,
        ("logs/result_*.txt", "own/result_0.txt"),
        """report {in}/logs --html {out}/page.html
        report {in}/own --json
        report {in}/logs {in}/own
        submission trace {in}/own/result_0.txt
        submission diff {in}/logs {in}/own
        plan --calibrate {in}/own/result_0.txt --gpus 8""",
    ),
    "checked log": Format(
        _logs,
        ("logs/result_*.txt", "own/result_0.txt"),
        """submission check {in}/logs
        submission check {in}/own/result_0.txt --json -""",
        quick=False,
    ),
    "run files": Format(
        _run_folder,
        (
            "out/run_0/metrics.jsonl",
            "out/run_0/summary.json",
            "out/run_0/config.json",
            "out/data/baselines.json",
        ),
        """report {in}/out --html {out}/page.html
        report {in}/out
        report {in}/out --json""",
    ),
    "checked run files": Format(
        _run_folder,
        ("out/run_0/*.json*",),
        """submission check {in}/out
        submission repeat {in}/out/result_0.txt --data {in}/data""",
        quick=False,
    ),
    "system": Format(
        _tree,
        ("tree/systems/*.json", "tree/results/*/bert/result_*.txt"),
        """report {in}/tree --html {out}/page.html
        submission diff {in}/tree/results/cpu_demo {in}/tree/results/cpu_demo/bert/result_1.txt""",
    ),
    "checked system": Format(
        _tree,
        ("tree/systems/*.json", "tree/results/*/SHA256SUMS", "tree/results/*/run_*"),
        "submission check {in}/tree",
        quick=False,
    ),
    "shape": Format(
        _run_folder,
        ("bert_config.json", "out/run_0/weights/bert_config.json"),
        f"""plan --model {{in}}/bert_config.json --gpus 8 --samples 1e5
        {_SHORT}
        {_SHORT} --print-config
        convert torch-to-hf {{in}}/out/run_0/weights {{out}}/hf""",
    ),
    "checkpoint": Format(
        _interrupted,
        (
            "out/run_0/checkpoints/*/*",
            "out/run_0/metrics.jsonl",
            "out/run_0/config.json",
            "out/result_0.txt",
        ),
        train_words(resume=1),
        quick=False,
    ),
    "weights": Format(
        _hugging_face,
        ("hf/*", "out/run_0/weights/*", "nvidia.pt", "composer.pt"),
        f"""convert torch-to-hf {{in}}/out/run_0/weights {{out}}/hf
        convert hf-to-torch {{in}}/hf {{out}}/weights
        convert nvidia-to-torch {{in}}/nvidia.pt {{out}}/x --config {{in}}/bert_config.json
        convert composer-to-torch {{in}}/composer.pt {{out}}/x --config {{in}}/bert_config.json
        {_SHORT} {_WEIGHTS}
        {_SHORT} {_WEIGHTS} --evaluate-only""",
    ),
    "prepared set": Format(
        _packed,
        ("data/train/*", "packed/*", "data/eval/*"),
        f"""prepare verify {{in}}/data/train --workers 1
        prepare verify {{in}}/packed --workers 1
        prepare pack --input {{in}}/data/train --out {{out}}/packed --workers 1
        prepare export-nvidia --input {{in}}/packed --out {{out}}/x --layout packed --workers 1
        prepare hdf5-to-tfrecord --input {{in}}/data/train --out {{out}}/x --workers 1
        prepare digest {{in}}/data/train
        {_SHORT}
        {train_words(output_dir="{out}/run", max_steps=1, input_dir="{in}/packed", average_packing_rate=2)}""",
    ),
    "mds": Format(
        _mds,
        ("plain/*", "zstd/*", "texts/data/*/*"),
        f"""prepare verify {{in}}/plain --workers 1
        prepare verify {{in}}/zstd --workers 1
        {_IMPORT} --input {{in}}/zstd
        {_IMPORT} --input {{in}}/plain
        pretrain {{in}}/texts/main.yaml data_local={{in}}/texts/data {_PRETRAIN} {_TEXTS}""",
    ),
    "tfrecord": Format(
        _tfrecords,
        ("records/*",),
        f"""prepare verify {{in}}/records --workers 1
        prepare recognise {{in}}/records
        prepare digest {{in}}/records
        {_TO_HDF5}
        {_TO_HDF5} --skip-bad""",
    ),
    "hdf5": Format(
        _hdf5,
        ("*/part_00000.hdf5",),
        "\n".join(
            f"""prepare verify {{in}}/{layout} --workers 1
            {_IMPORT} --input {{in}}/{layout}
            prepare bins-hdf5 {{in}}/{layout} {{out}}/x --edges 16,40 --workers 1"""
            for layout in ("fixed", "variable", "packed")
        ),
    ),
    "text": Format(
        _set,
        ("text/part.txt", "data/vocab.txt"),
        f"""{_SET.replace("{in}/data", "{out}/data")}
        prepare instances --input {{in}}/text --vocab {{in}}/data/vocab.txt --out {{out}}/x --workers 1
        prepare recognise {{in}}/text""",
    ),
    "vocabulary": Format(
        _tfrecords,
        ("data/vocab.txt",),
        f"""{_TO_HDF5}
        prepare instances --input {{in}}/text --vocab {{in}}/data/vocab.txt --out {{out}}/x --workers 1""",
    ),
    "tasks": Format(
        _tasks,
        ("train.csv", "eval.jsonl", "task.yaml", "hf/vocab.txt", "hf/tokenizer*.json"),
        """finetune {in}/task.yaml save_folder={out}/run
        finetune {in}/task.yaml save_folder={out}/run load_path={in}/hf""",
        quick=False,
    ),
    "yaml": Format(
        _yaml,
        ("*.yaml",),
        f"""train --config {{in}}/run.yaml --print-config
        plan --config {{in}}/run.yaml --gpus 8 --precision bf16 --samples 1e5
        pretrain {{in}}/main.yaml data_local={{in}}/data tokenizer_name={{in}}/vocab.txt {_PRETRAIN}""",
    ),
}
CAMPAIGN = FORMATS | {
    "other commands": Format(
        _tasks,
        (
            "data/train/manifest.json",
            "data/vocab.txt",
            "text/part.txt",
            "hf/*",
            "task.yaml",
            "out/result_0.txt",
        ),
        f"""fill-mask {{in}}/hf river_holds_the_[MASK]
        export {{in}}/out --out {{out}}/x
        prepare shuffle --input {{in}}/data/train {_ALL}
        prepare bins --input {{in}}/data/train --edges 16,32 {_ALL}
        prepare eval-set --input {{in}}/data/train --num 8 --out {{out}}/x
        prepare estimate --input {{in}}/text/part.txt --vocab {{in}}/data/vocab.txt --workers 1 --sample-mb 0.01
        prepare clean --input {{in}}/text {_ALL}
        prepare glue --out {{out}}/x
        prepare download --manifest {{in}}/out/run_0/config.json --out {{out}}/x
        glue {{in}}/task.yaml data.glue={{in}}/text
        mosaic {{in}}/task.yaml max_duration=1ba
        submission seal {{in}}/out
        submission export {{out}}/x --tree {{in}}
        submission new-system x1_n1 --tree {{in}}
        launch abort-log {{in}}/out/result_0.txt --reason test
        launch test-network --sizes 1
        bench step --config {{in}}/bert_config.json""",
    ),
    "pretrain": Format(
        _set,
        ("text/part.txt", "data/vocab.txt"),
        "pretrain {in}/text --out {out}/x --minutes 0.05 --size tiny --vocab {in}/data/vocab.txt",
    ),
}
