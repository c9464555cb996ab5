"""Follow the pages of two users and of a growing machine line by line, from an installed wheel.

The text, the model and the numbers of tokens are less than a thousandth of the pages'.
"""

import csv
import random
import shlex
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

from programs import (
    free_ports,
    run_checked,
    run_quietly,
    user_environ,
    write_mlbert,
    write_program,
)

SECONDS = 900
LANGUAGE = "docs/language_model.md"
DOMAIN = "docs/domain_model.md"
CLUSTER = "docs/one_gpu_to_cluster.md"
SYSTEM = "benchmarks/bert/implementations/modernbert"
NUM_DOCUMENTS = 600
WORDS = ["".join(letters) for letters in product("bdglmnrst", "aeiou", "bdglmnrst", "aeiou")]
# What a line has -> what the test types.
SMALLER = {
    "modernbert-base": "small",
    "30e9": "3000",
    "4e9": "2000",
    "3e9": "2000",
    "1e9": "2000",
    "50368": "512",
    "512": "4",
    "1024": "32",
    "500": "20",
    "-n 8": "-n 2",
    "node1,node2": "127.0.0.1,localhost",
}
SSH = """#!/bin/sh
while [ "$1" = -o ]; do shift 2; done
shift
cd /
exec sh -c "$*"
"""
ROWS = {"--length": "32", "--batch": "4"}


def commands(page: Path) -> Iterator[list[str]]:
    """Yield the words of each line that a page's reader types, except of a system folder."""
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("$ mlbert "):
            yield shlex.split(line.removesuffix("…").strip())[1:]


def smaller(words: list[str]) -> list[str]:
    """Return a line's words for little text and a small model; plans stay as they are."""
    if words[1] == "plan":
        return words
    line = " ".join(SMALLER.get(word, word) for word in words).replace("-n 8", "-n 2")
    chosen = line.split()
    if "pretrain" in words:
        for option, value in ROWS.items():
            if option not in chosen:
                chosen += [option, value]
    return chosen


def sentences(draw: random.Random, count: int) -> str:
    return " ".join(f"{' '.join(draw.choices(WORDS, k=6))}." for _ in range(count))


@pytest.fixture(scope="module")
def home(wheel_site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the users' text, outside of the repository."""
    folder = tmp_path_factory.mktemp("home")
    draw = random.Random(1)
    (folder / "texts").mkdir()
    documents = [sentences(draw, draw.randrange(1, 8)) for _ in range(NUM_DOCUMENTS)]
    (folder / "texts/a.txt").write_text("\n\n".join(documents))
    with (folder / "rows.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "body"])
        writer.writerows((n, sentences(draw, 4)) for n in range(NUM_DOCUMENTS))
    with (folder / "labeled.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label"])
        for _ in range(60):
            kind = draw.choice(["red", "blue"])
            writer.writerow([f"{kind} {sentences(draw, 1)}", kind])
    write_mlbert(folder / "bin")
    write_program(folder / "bin/ssh", SSH)
    return folder


def type_line(home: Path, site: Path, words: list[str]) -> str:
    path = f"{home / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
    environ = user_environ(PYTHONPATH=site, PATH=path, CPU_THREADS=1, CUDA_VISIBLE_DEVICES="")
    done = run_quietly("mlbert", *words[1:], cwd=home, env=environ, timeout=SECONDS)
    assert done.returncode == 0, f"{words}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_a_model_for_a_language_and_a_domain(home: Path, wheel_site: Path, tree_root: Path) -> None:
    lines = list(commands(tree_root / LANGUAGE))
    trained = [words for words in lines if words[1] in ("prepare", "pretrain")]
    assert len(trained) - 1 == 5, "and a trial"
    said = ""
    for words in lines:
        said += type_line(home, wheel_site, smaller(words))
    assert (home / "base-final/model/model.safetensors").exists()
    assert (home / "data/report.html").exists()
    assert "only about" in said, "few steps are warned of"

    (home / "ModernBERT-base").symlink_to(home / "base-final/model")
    (home / "data").rename(home / "data-of-language")
    for words in commands(tree_root / DOMAIN):
        output = type_line(home, wheel_site, smaller(words))
        if "--dry-run" in words:
            assert "MB/s" in output
        if "pretrain" in words:
            assert "before training: held-out accuracy" in output
    assert (home / "field/model/model.safetensors").exists()


@pytest.mark.slow
@pytest.mark.timeout(3 * SECONDS)
def test_from_one_gpu_to_a_cluster(home: Path, wheel_site: Path, tree_root: Path) -> None:
    lines = list(commands(tree_root / CLUSTER))
    make = "mlbert prepare tokenizer texts/ --size 512 --out cluster/tokenizer"
    type_line(home, wheel_site, make.split())
    (home / "cluster/texts").symlink_to(home / "texts")
    (home / "cluster/bin").symlink_to(home / "bin")
    shares = [words for words in lines if "--task" in words]
    (merge,) = (words for words in lines if "--merge" in words)
    others = [words for words in lines if words not in [*shares, merge]]
    for number, words in enumerate(others):
        chosen = smaller(words)
        if "pretrain" in words:  # alternatives
            chosen[chosen.index("base")] = f"base-{number}"
        if "hosts" in words:
            chosen[3:3] = ["--master-port", str(free_ports(1)[0])]
        type_line(home / "cluster", wheel_site, chosen)
    trained = sorted(home.glob("cluster/base-*/model/model.safetensors"))
    assert len(trained) == 3

    whole = contents(home / "cluster/data")
    (home / "cluster/data").rename(home / "cluster/whole")
    for words in [*shares, *shares, merge]:
        type_line(home / "cluster", wheel_site, words)
    assert contents(home / "cluster/data") == whole


def test_the_job_of_the_page_about_a_cluster(tree_root: Path, tmp_path: Path) -> None:
    """With a program in place of sbatch that notes what it was given."""
    blocks = (tree_root / CLUSTER).read_text(encoding="utf-8").split("```")
    (block,) = (block for block in blocks if "$ sbatch" in block)
    lines = [line.removeprefix("$ ") for line in block.splitlines() if line.startswith("$ ")]
    assert lines[0] == f"cd {SYSTEM}"
    names = "DATADIR_PHASE2|EVALDIR|TOKENIZER|MAX_STEPS|BATCHSIZE_WARMUP_STEPS"
    note = f'{{ echo "$*"; env | grep -E "^({names})=" | sort; }} >"{tmp_path}/submitted"'
    write_program(tmp_path / "bin/sbatch", f"#!/bin/sh\n{note}\n")
    environ = user_environ(PATH=f"{tmp_path / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin")
    script = "\n".join(["set -eu", *lines])
    run_checked("bash", "-c", script, cwd=tree_root, env=environ)
    submitted = (tmp_path / "submitted").read_text().splitlines()
    assert submitted[0].startswith("-N 8 -t ")
    settings = dict(line.split("=") for line in submitted[1:])
    assert len(settings) == 5
    assert settings["DATADIR_PHASE2"] == "/shared/data/train"
    step_tokens = 4608 * 1024
    assert int(settings["MAX_STEPS"]) == -(-30 * 10**9 // step_tokens)


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file of a set, without its report."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".html"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}
