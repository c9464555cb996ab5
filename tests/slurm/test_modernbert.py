"""The ModernBERT system's own command at a tiny size: a rank that is killed costs no steps."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

import mlbert
from cluster import Cluster
from mlbert.config.bert_config import BertConfig
from mlbert.distributed.place import expand_hostlist
from mosaic_texts import make_texts
from training_settings import read_metrics, read_summary

SYSTEM = "benchmarks/bert/implementations/modernbert"
CONFIG = "config_ModernBERT_8x8x72x1_h100.sh"
ROW = 24  # tokens
ROWS = 4  # of a rank's step
RANKS = 2
STEPS = 300  # full ones
SMALLER = {
    "DGXNNODES": RANKS,
    "DGXNGPU": 1,
    "WALLTIME": 10,
    "CONT": "",
    "SRUN_ARGS": "",
    "PRECISION": "fp32",
    "CPU_THREADS": 1,
    "CLEAR_CACHES": 0,
    "CHECK_COMPLIANCE": 0,
    "MAX_SEQ_LENGTH": ROW,
    "BATCHSIZE": ROWS,
    "GRADIENT_STEPS": 2,
    "BATCHSIZE_WARMUP_START": 2,
    "BATCHSIZE_WARMUP_STEPS": 40,
    "STEP_TOKENS": RANKS * ROWS * ROW,
    "MAX_STEPS": STEPS,
    "WARMUP_STEPS": 20,
    "EVAL_BATCH_SIZE": 16,
    "EVAL_ITER_STEPS": 100,
    "SAVE_CHECKPOINT_STEPS": 20,
    "LOG_FREQ": 20,
    "SEED": 3,
}


@pytest.fixture
def texts(tmp_path: Path, tree_root: Path) -> dict[str, object]:
    """Write texts, a vocabulary and a small shape, and return the exports that name them."""
    make_texts(tmp_path, tree_root)
    shape = tmp_path / "shape.json"
    small = {"vocab_size": 15, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2}
    published = tree_root / "benchmarks/bert/implementations/pytorch/configs/modernbert_base.json"
    modern = BertConfig.from_json(published)
    sizes = {**small, "intermediate_size": 48, "local_attention": 8}
    shape.write_text(replace(modern, **sizes).to_json())
    return {
        "DATADIR_PHASE2": tmp_path / "data/train_small",
        "EVALDIR": tmp_path / "data/val",
        "TOKENIZER": tmp_path / "vocab.txt",
        "BERT_CONFIG": shape,
    }


def submit(cluster: Cluster, tree_root: Path, exports: dict[str, object]) -> str:
    """Source the published config, export what is smaller, submit, and return the job."""
    words = " ".join(f"{name}='{value}'" for name, value in exports.items())
    output = f"--output='{exports['LOGDIR']}.out'"
    line = f"set -eu; source {CONFIG}; export {words}; "
    line += f"sbatch --parsable {output} -N ${{DGXNNODES}} -t ${{WALLTIME}} run.sub"
    package = {"PYTHONPATH": str(Path(mlbert.__file__).parents[1])}
    done = cluster.run("bash", "-c", line, cwd=tree_root / SYSTEM, environment=package)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


@pytest.mark.slow
def test_a_killed_rank_of_the_modernbert_system_loses_no_steps(
    cluster: Cluster, tree_root: Path, tmp_path: Path, texts: dict[str, object]
) -> None:
    jobs = {}
    for name in ("whole", "killed"):
        exports = {**SMALLER, **texts, "LOGDIR": tmp_path / name}
        jobs[name] = submit(cluster, tree_root, exports)
    killed = jobs["killed"]
    checkpoints = tmp_path / "killed/run_0/checkpoints"
    cluster.wait_for(
        lambda: list(checkpoints.glob("step_*")) or cluster.job(killed)["JobState"] == "FAILED",
        90,
        "a checkpoint",
    )
    output = tmp_path / "killed.out"
    assert list(checkpoints.glob("step_*")), output.read_text()
    lost = expand_hostlist(cluster.job(killed)["NodeList"])[1]
    os.kill(cluster.rank(killed, 1), signal.SIGKILL)
    facts = {name: cluster.wait_for_end(job) for name, job in jobs.items()}
    said = output.read_text()
    assert facts["killed"]["Restarts"] == "1", said
    assert lost not in expand_hostlist(facts["killed"]["NodeList"])
    assert f"{lost} is excluded from this job: rank 1 on {lost} died after step " in said
    assert "resumed at step" in said
    # Its last line is that of a run without a target.
    assert [one["JobState"] for one in facts.values()] == ["COMPLETED"] * 2, said
    for name in ("steps", "tokens", "samples", "accuracy", "ranks"):
        summaries = [read_summary(tmp_path / folder) for folder in jobs]
        assert summaries[0][name] == summaries[1][name], name
    assert summaries[0]["ranks"] == RANKS
    assert summaries[0]["tokens"] >= STEPS * RANKS * ROWS * ROW
    curves = [
        [(point["step"], point["loss"]) for point in read_metrics(tmp_path / folder)]
        for folder in jobs
    ]
    assert curves[0] == curves[1]
    weights = [
        (tmp_path / folder / "run_0/weights/model.safetensors").read_bytes() for folder in jobs
    ]
    assert weights[0] == weights[1]
