"""Published lines after quickstart.sh alone, with real files:
they work, or name the command that installs an extra.

`test_samsung` and `test_mosaic_systems` run Samsung's
and MosaicML's other lines in this environment.
"""

import json
import shutil
import sys
from pathlib import Path

import pytest

from programs import run_quietly, user_environ
from training_settings import SHAPE

BERT = Path("benchmarks/bert/implementations")
MOSAIC = Path("benchmarks/mosaic_bert")
SAMSUNG = BERT / "samsung_dgxa100_n128"
INVENTEC = BERT / "inventec_p8000_h100_n1"
WEIGHTS = "{data}/checkpoint"
CHECKPOINT = (
    "--tf_checkpoint {data}/phase1/model.ckpt-28252.index --bert_config_path "
    "{data}/phase1/bert_config.json"
)
PREPARE = (
    "./input_preprocessing/prepare_data.sh --outputdir {data} --packed-data --skip-download "
    "--workers 1"
)
CONVERT = "python common/convert_dataset.py --dataset text --path articles.jsonl --out_root"
# Folder, line, and the extra that it needs, if any. Lines of one folder follow each other.
LINES = [
    (
        SAMSUNG,
        f"python convert_tf_checkpoint.py {CHECKPOINT} --output_checkpoint model.ckpt-28252.pt",
        "tf",
    ),
    (INVENTEC, PREPARE, "tf"),
    # The weights were converted on another machine.
    (
        INVENTEC,
        f"mkdir {WEIGHTS}; touch {WEIGHTS}/model.safetensors; {PREPARE} --eval-samples 100",
        "",
    ),
    (BERT / "tensorflow2", "python run_pretraining.py --num_gpus=1 --train_batch_size=32", "tf"),
    (BERT / "tensorflow2", "python -m tf2_bert.bert_benchmark --benchmark_filter=short_cpu", "tf"),
    (MOSAIC, f"{CONVERT} ./my-copy-c4 --splits train_small val", ""),
    (MOSAIC, f"{CONVERT} ./zipped --splits val --compression zstd", "streaming"),
    (
        MOSAIC,
        "python common/text_data.py --local_path ./my-copy-c4 --tokenizer bert-base-uncased",
        "",
    ),
    (MOSAIC, "mlbert launch local main.py yamls/test/main.yaml", "huggingface"),
    (MOSAIC, "mlbert launch local main.py yamls/test/main.yaml model.name=mosaic_bert", ""),
]


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, tree_root: Path) -> Path:
    """Return a tree with the folders of the lines, and real files in data/."""
    tree = tmp_path_factory.mktemp("published") / "a tree"
    for folder in {folder for folder, _, _ in LINES}:
        shutil.copytree(tree_root / folder, tree / folder)
    (tree / BERT / "pytorch").symlink_to(tree_root / BERT / "pytorch")
    parts = tree / "data/download/results4"
    first = tree / "data/phase1"
    parts.mkdir(parents=True)
    first.mkdir()
    assets = tree_root / "tests/assets/instances"
    for name in ("part-00000-of-00001", "eval.txt"):
        shutil.copy2(assets / "text.txt", parts / name)
    shutil.copy2(assets / "vocab.txt", first)
    (first / "bert_config.json").write_text(json.dumps(SHAPE))
    (first / "model.ckpt-28252.index").touch()
    texts = (
        f"Sentence {number} of the river, the bridge and the kitchen." for number in range(400)
    )
    (tree / MOSAIC / "articles.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in texts)
    )
    return tree


@pytest.mark.parametrize(
    ("folder", "line", "extra"),
    [
        pytest.param(
            *each,
            id=each[1].partition(" -")[0],
            marks=[pytest.mark.slow] if "launch local" in each[1] else [],
        )
        for each in LINES
    ],
)
def test_published_line(
    folder, line, extra, tree: Path, tree_root: Path, quickstart_python: Path
) -> None:
    environ = user_environ(PATH=f"{quickstart_python.parent}:/usr/bin:/bin", OMP_NUM_THREADS=1)
    done = run_quietly(
        "bash", "-c", line.replace("{data}", f"'{tree}/data'"), cwd=tree / folder, env=environ
    )
    last = (done.stderr.splitlines() or [""])[-1]
    assert done.returncode == (2 if extra else 0), done.stdout[-2000:] + done.stderr[-2000:]
    if extra:
        command = f"pip install -c constraints.txt -e '.[{extra}]'"
        assert f"Run in the root of the repository: {command}. [package.missing]" in last
        readme = (tree_root / folder / "README.md").read_text()
        assert command in readme or (folder == MOSAIC and '-e ".[bert]"' in readme), (
            "the README must say so"
        )


def test_missing_tensorflow_is_a_one_line_error(tree_root: Path) -> None:
    """Use a Python without any installed package."""
    done = run_quietly(
        sys.executable, "-I", "-S", tree_root / BERT / "tensorflow2/run_pretraining.py"
    )
    assert done.returncode == 2
    command = "Run in the root of the repository: pip install -c constraints.txt -e '.[tf]'"
    line = f"mlbert: error: tensorflow: is not installed. {command}. [package.missing]"
    assert done.stderr == f"{line}\n"
