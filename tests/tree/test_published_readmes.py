"""The commands of the published READMEs, as docs/from_the_published_readmes.md lists them,
one shell per section.

Stand-ins replace engines that are not installed (Docker, enroot, Slurm, ssh, package managers) and
slow programs. They record how they were called, and fail if a program or YAML file among their
arguments does not exist.
"""

import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

import pytest

from programs import run_quietly, write_program

HOME = Path("benchmarks/bert/implementations")
INVENTEC = HOME / "inventec_p8000_h100_n1"
CONFIG = "config_P8000H100_1x8x48x1_pack.sh"
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
ROW = re.compile(r"^\| `([^|]+)`(?: in `[^|]+`)? \| ([^|]+) \|([^|]*)\|$", re.MULTILINE)
STAND_IN = """#!{python}
import json, os, sys
from pathlib import Path
name, words = Path(sys.argv[0]).name, sys.argv[1:]
with open({notes!r}, "a") as file:
    file.write(json.dumps([name, words, os.getcwd(), dict(os.environ)]) + "\\n")
if name in ("python", "mlbert"):
    files = [word for word in words if word.endswith((".py", ".yaml"))]
    missing = [file for file in files if not Path(file).exists()]
    if missing:
        sys.exit(f"{{missing}} in {{os.getcwd()}}")
if words[:2] == ["prepare", "recognize"]:
    print("text")
if words[:2] == ["prepare", "download"]:
    folder = Path(words[3])
    (folder / "text").mkdir(parents=True)
    for file in ("vocab.txt", "text/eval.txt"):
        (folder / file).touch()
if name == "sbatch":
    Path("slurm-7.out").touch()
if words[:2] == ["clone", "https://github.com/tensorflow/benchmarks.git"]:
    Path("benchmarks").mkdir(exist_ok=True)
if "launch" in words or name == "ssh":
    run = Path(os.environ.get("LOGDIR", "."), "run_" + os.environ.get("EXPERIMENT", "0"))
    run.mkdir(parents=True, exist_ok=True)
    (run / "summary.json").touch()
    run.with_name(run.name.replace("run_", "result_") + ".txt").touch()
"""
STAND_INS = [
    "docker",
    "enroot",
    "sbatch",
    "ssh",
    "git",
    "gcloud",
    "pip",
    "tail",
    "python",
    "mlbert",
    "quickstart.sh",
    "download_code.sh",
]
# Placeholders in the published commands, and their values in the sandbox.
FILLED_IN = {
    r"<SLURM JOB ID>": "7",
    r"<CONTAINER ID>": "c0ffee",
    r"<path/to/python>": "{root}/bin/python",
    r"<path/to/\w+(/[^<>]+)?>": r"{root}/in\1",
    r"/workspace/": "{root}/workspace/",
}
SHELLS = [
    "bash",
    pytest.param(
        "zsh", marks=pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
    ),
]


def commands(section: str, tree_root: Path) -> list[str]:
    parts = SECTION.split((tree_root / "docs/from_the_published_readmes.md").read_text())
    typed = []
    for published, here, why in ROW.findall(parts[parts.index(section) + 1]):
        own = re.fullmatch(r"`(.+)`", here)
        assert here == "same" or why.strip(), f"{published}: the table must say why it differs"
        if own or here == "same":
            typed.append(own[1] if own else published)
        else:
            assert here in ("none", "the line above") or re.fullmatch(r"\[.+\]\(.+\)", here), here
    return typed


class Sandbox:
    """A copy of the folders in which the commands run, in a tree with a space in its path."""

    def __init__(self, root: Path, tree_root: Path) -> None:
        self.root = root
        self.tree = root / "a tree"
        self.tree_root = tree_root
        for name in (
            "inventec_p8000_h100_n1",
            "samsung_dgxa100_n128",
            "composer",
            "8xA100_80GB-methods",
        ):
            shutil.copytree(tree_root / HOME / name, self.tree / HOME / name)
        (self.tree / HOME / "pytorch").symlink_to(tree_root / HOME / "pytorch")
        shutil.copytree(tree_root / "benchmarks/mosaic_bert", self.tree / "benchmarks/mosaic_bert")
        for name in ("bin", "in", "workspace"):
            (root / name).mkdir()
        (root / "in/model.safetensors").touch()
        (root / "workspace/bert").symlink_to(self.tree / INVENTEC)
        (self.tree / ".venv/bin").mkdir(parents=True)
        (self.tree / ".venv/bin/activate").touch()
        self.notes = root / "notes"
        text = STAND_IN.format(python=sys.executable, notes=str(self.notes))
        for name in STAND_INS:
            write_program((self.tree if name.endswith(".sh") else root / "bin") / name, text)

    def type(
        self, lines: list[str], shell: str = "bash", cwd: Path | None = None, **exports: object
    ):
        script = "\n".join(("set -e", *lines))
        for published, here in FILLED_IN.items():
            script = re.sub(published, here.format(root=self.root), script)
        assert not re.search(r"<[^<>\n]+>", script), "an unknown placeholder"
        environ = {"PATH": f"{self.root}/bin:{os.environ['PATH']}", "HOME": str(self.root)}
        environ |= {name: str(value) for name, value in exports.items()}
        return run_quietly(shell, "-c", script, cwd=cwd or self.tree, env=environ)

    def follow(self, section: str, shell: str = "bash", **exports: object) -> str:
        done = self.type(commands(section, self.tree_root), shell, **exports)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stderr

    def calls(self, program: str) -> list[tuple[list[str], Path, Mapping[str, str]]]:
        """Return the arguments, folder and environment of each call of a program."""
        notes = [json.loads(line) for line in self.notes.read_text().splitlines()]
        return [
            (words, Path(folder), environ)
            for name, words, folder, environ in notes
            if name == program
        ]


@pytest.fixture
def sandbox(tmp_path: Path, tree_root: Path) -> Sandbox:
    return Sandbox(tmp_path, tree_root)


@pytest.mark.parametrize("shell", SHELLS)
def test_inventec(shell: str, sandbox: Sandbox) -> None:
    assert sandbox.follow("Inventec P8000, MLPerf Training v5.0", shell) == ""
    build, run, *_ = sandbox.calls("docker")
    assert build[0] == ["build", "--pull", "-t", "mlperf-nvidia:bert_ngc23.09_pyt", "."]
    assert (build[1] / "Dockerfile").is_file()
    assert f"{sandbox.tree}:{sandbox.root}/workspace/tree" in run[0]
    ((words, folder, environ),) = sandbox.calls("sbatch")
    assert words == ["-w", "compute-h100-1", "--time=85", "run.sub"]
    assert (folder / "run.sub").is_file()
    assert environ["CONFIG_FILE"] == str(sandbox.tree / INVENTEC / CONFIG)
    ((imported, _, _),) = sandbox.calls("enroot")
    assert environ["CONT"] == imported[2], "the job must start the image that enroot imported"
    steps = [" ".join(words[:2]) for words, _, _ in sandbox.calls("mlbert")]
    assert steps.count("prepare download") == 1, "the second call has --skip-download"
    assert steps.count("prepare pack") == steps.count("convert tf1-to-torch") == 2
    packs = [
        words[words.index("--out") + 1]
        for words, _, _ in sandbox.calls("mlbert")
        if words[1] == "pack"
    ]
    data = {"DATADIR_PHASE2": Path(packs[0]).name, "EVALDIR": "eval"}
    assert {name: environ[name] for name in data} == {
        name: f"/mnt/mlperf/bert_data/{v}" for name, v in data.items()
    }


def test_samsung(sandbox: Sandbox) -> None:
    folder = sandbox.tree / HOME / "samsung_dgxa100_n128"
    config = folder / "config_Samsung_Supercomputer21_DGXA100_128x8x16x1.sh"
    # `hosts` names two nodes.
    config.write_text(config.read_text().replace("DGXNNODES=128", "DGXNNODES=2"))
    sandbox.follow("Samsung, MLPerf Training v2.0", CLEAR_CACHES=0, LOGDIR=sandbox.root / "out")
    hosts = [words[2] for words, _, _ in sandbox.calls("ssh")]
    assert sorted(hosts) == ["192.168.16.1"] * 11 + ["192.168.16.2"] * 11
    assert len(sandbox.calls("download_code.sh")) == 1
    assert [words[:2] for words, _, _ in sandbox.calls("mlbert")] == [["prepare", "export-nvidia"]]
    programs = [words[0] for words, _, _ in sandbox.calls("python")]
    assert {"convert_tf_checkpoint.py", "run_split_and_chop_hdf5_files.py"} <= set(programs)


def test_mosaic_mlperf(sandbox: Sandbox) -> None:
    exports = {
        "DATADIR_PHASE2": sandbox.root / "in",
        "EVALDIR": sandbox.root / "in",
        "INIT_CHECKPOINT": "none",
    }
    exports |= {"CLEAR_CACHES": 0, "NEXP": 1, "PYTHON": sandbox.root / "bin/python"}
    sandbox.follow("MosaicML, MLPerf Training v2.1", **exports)
    assert any(
        words[:4] == ["-m", "mlbert", "launch", "local"] for words, _, _ in sandbox.calls("python")
    )


def test_mosaic_examples(sandbox: Sandbox) -> None:
    sandbox.follow("MosaicML examples, BERT")
    launched = [words[2:] for words, _, _ in sandbox.calls("mlbert")]
    assert len(launched) == 10
    assert ["main.py", "yamls/main/hf-bert-base-uncased.yaml"] in launched
    for words, folder, _ in sandbox.calls("sbatch"):
        assert all(
            (folder / word).is_file() for word in words if word.endswith((".sub", ".py", ".yaml"))
        )


def test_google(sandbox: Sandbox) -> None:
    sandbox.follow("Google, MLPerf Training v0.7, TensorFlow 2")
    assert [words[0] for words, _, _ in sandbox.calls("git")] == ["clone", "checkout"]


def test_image_of_the_system_has_the_pinned_packages_and_the_same_base(tree_root: Path) -> None:
    own, ours = (
        (tree_root / HOME / name / "Dockerfile").read_text() for name in (INVENTEC.name, "pytorch")
    )
    base = re.compile(r"^ARG BASE_IMAGE=.*$", re.MULTILINE)
    assert base.findall(own) == base.findall(ours)
    listed = tomllib.loads((tree_root / "pyproject.toml").read_text())["project"]["dependencies"]
    expected = {re.match(r"[\w-]+", requirement)[0] for requirement in listed} - {"torch"}
    constraints = (tree_root / "constraints.txt").read_text()
    pins = dict(
        re.findall(r"^([\w-]+)==([^\s;]+)(?=$|; python_version <)", constraints, re.MULTILINE)
    )
    assert dict(re.findall(r"([\w-]+)==([\w.]+)", own)) == {name: pins[name] for name in expected}


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("options", ["", "set -eu; "])
def test_config_can_be_sourced_from_any_folder_or_link(
    shell: str, options: str, sandbox: Sandbox
) -> None:
    tmp_path = sandbox.root
    folder = sandbox.tree / INVENTEC
    link = sandbox.root / "a link"
    link.symlink_to(folder)
    words = f"{options}source env.sh; source {CONFIG}; "
    show = 'printf "%s\\n" "${CONFIG_FILE}" "${LOGDIR}" "${BERT_CONFIG}"'
    expected = [
        folder / CONFIG,
        sandbox.tree / f"runs/{CONFIG[7:-3]}",
        folder.parent / "pytorch/configs/large.json",
    ]
    for line, cwd in (
        (words, folder),
        (words, link),
        (words.replace("source ", f"source '{folder}'/"), tmp_path),
        (words.replace("source ", "source 'a link'/"), tmp_path),
        (f"cd 'a link'; {words}", tmp_path),
    ):
        done = sandbox.type([line + show], shell, cwd)
        assert (done.returncode, done.stderr) == (0, ""), line
        assert done.stdout.splitlines() == list(map(str, expected)), line

    # Sourcing env.sh alone clears the config.
    line = (
        f'source {CONFIG}; source env.sh; echo "${{CONFIG_FILE:-none}} ${{LR:-none}} '
        f'${{LOGDIR##*/}}"'
    )
    done = sandbox.type([f"{options}{line}"], shell, folder)
    assert (done.returncode, done.stderr, done.stdout) == (
        0,
        "",
        "none none inventec_p8000_h100_n1\n",
    )


@pytest.mark.parametrize("launcher", ["run_and_time.sh", "run_multinode.sh", "run_with_docker.sh"])
def test_invalid_count_is_a_one_line_error(launcher: str, sandbox: Sandbox) -> None:
    values = ("x", "0", "-1", "1e9", "8 8", "100000")
    for name, value in (
        *(("DGXNGPU", value) for value in values),
        ("DGXNNODES", "x"),
        ("NEXP", "0"),
    ):
        line = f"source {CONFIG}; {name}='{value}' LOGDIR=$HOME ../pytorch/launch/{launcher}"
        done = sandbox.type([line], cwd=sandbox.tree / INVENTEC)
        assert (done.returncode, done.stderr) == (
            2,
            f"error: {name}={value} is not a whole number from 1 to 99999.\n",
        )
