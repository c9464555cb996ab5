"""Jobs on a real Slurm: the documented commands, overrides, user errors, arrays,
concurrent jobs and preparation.
"""

import contextlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import mlbert
from cluster import Cluster
from mlaudit.logs import read_log
from mlbert.data.formats.manifest import read_manifest
from mlbert.data.prepare.split_bins import make_bins
from mosaic_texts import BASE, make_texts
from slurm_site import Site
from stored_sets import tree
from text_sets import json_lines
from training_settings import SHAPE, train_arguments

# Exports, the error, and how often the job prints it:
# what a node lacks, each of the two nodes names.
USER_ERRORS: list[tuple[dict[str, str], str, int]] = [
    ({"DGXNNODES": "3"}, "the job has 2 nodes, the config has DGXNNODES=3", 1),
    (
        {"SYNTH_DATA": "0", "DATADIR_PHASE2": "/nowhere"},
        ": DATADIR_PHASE2=/nowhere cannot be read here",
        2,
    ),
    ({"LOGDIR": "/proc/nowhere"}, "LOGDIR=/proc/nowhere cannot be created", 1),
    ({"TIMED": "maybe"}, "TIMED=maybe is neither yes nor no", 1),
    ({"LR": "fast"}, "'fast' is not a number", 1),
]
WORDS = ("the", "river", "runs", "under", "a", "bridge", "by", "the", "old", "kitchen", "1984")
KILLS = 3
ENVIRONMENT = {"SBATCH_OUTPUT": "/dev/null", "SBATCH_EXCLUSIVE": "exclusive"}  # one job per node


def text_exports(site: Site, prepared: Path) -> dict[str, object]:
    """Return exports for training on prepared text with a target that is reached at once."""
    shape = site.runs.parent / "bert_of_this_text.json"
    shape.write_text(
        json.dumps({**SHAPE, "vocab_size": read_manifest(prepared / "train").vocab_size})
    )
    data = {
        "SYNTH_DATA": 0,
        "DATADIR_PHASE2": prepared / "train",
        "EVALDIR": prepared / "eval",
        "BERT_CONFIG": shape,
    }
    evaluation = {"NUM_EVAL_EXAMPLES": 64, "EVAL_ITER_START_SAMPLES": 100, "EVAL_ITER_SAMPLES": 100}
    return data | evaluation | {"TARGET_MLM_ACCURACY": 0.001, "MAX_STEPS": 100}


def test_two_nodes_train_and_pass_the_official_check(site: Site, prepared_data: Path) -> None:
    own = {"NEXP": 2, "LR": "0.02", "CLEAR_CACHES": 1, "CHECK_COMPLIANCE": 1, "SEED": 40}
    state, output = site.run(**text_exports(site, prepared_data), **own)
    assert (state, output.count("no errors")) == ("COMPLETED", 2), output
    assert "time to train" in output
    for run in (0, 1):
        log = read_log(site.runs / f"out/result_{run}.txt")
        assert (log.value("seed"), log.status) == (40 + run, "success")
        assert log.value("opt_base_learning_rate") == 0.02, "an override after sourcing must win"
        assert log.value("cache_clear") == ("Page cache not cleared" not in output)


@pytest.mark.slow
def test_three_nodes_measure_the_network_and_train(site: Site, prepared_data: Path) -> None:
    results = site.runs.parent / "results/test/bert/result_0.txt"
    own = {"NCCL_TEST": 1, "CHECK_COMPLIANCE": 1, "COLLECT_RESULTS": 1}
    state, output = site.run(nodes=3, **text_exports(site, prepared_data), **own)
    assert (state, output.count("no errors")) == ("COMPLETED", 1), output
    assert "slowest node: node" in output
    assert len(set(re.findall(r"(node\d+): [\d.]+ GB/s to a neighbor", output))) == 3, output
    assert json.loads((site.runs / "out/run_0/summary.json").read_text())["ranks"] == 3
    assert results.read_bytes() == (site.runs / "out/result_0.txt").read_bytes()


@pytest.mark.slow
def test_two_nodes_train_from_bins_and_exchange_padding(
    site: Site, prepared_data: Path, tmp_path: Path
) -> None:
    longest = read_manifest(prepared_data / "train").max_seq_length
    make_bins(prepared_data / "train", tmp_path / "bins", edges=(longest - 1, longest))
    balanced = {"BIN_COUNTS": "2 2", "EXCHANGE_PADDING": "group", "GRADIENT_CLIPPING": "buckets"}
    exports = {**text_exports(site, prepared_data), **balanced, "DATADIR_PHASE2": tmp_path / "bins"}
    method = {
        "RECIPE": "ddp_adam",
        "OPTIMIZER": "adamw",
        "MAX_SEQUENCES_PER_PACK": 1,
        "PACKING_FACTOR": 1,
    }
    state, output = site.run(**exports, **method, DGXNGPU=2, CHECK_COMPLIANCE=1)
    assert (state, output.count("no errors")) == ("COMPLETED", 1), output
    log = read_log(site.runs / "out/result_0.txt")
    assert (log.status, log.value("global_batch_size")) == ("success", 16)
    assert json.loads((site.runs / "out/run_0/summary.json").read_text())["ranks"] == 4


@pytest.mark.slow
def test_job_on_one_node(site: Site) -> None:
    state, output = site.run(nodes=1, DGXNGPU=2, BIND_CPUS=1, SRUN_ARGS="--gres=gpu:8")
    # Random tokens cannot be learned: the run ends at MAX_STEPS without reaching its target and
    # fails.
    assert state == "FAILED", output
    assert "run 0 ended with status 1" in output
    assert (site.runs / "out/run_0/summary.json").exists(), output


@pytest.mark.slow
def test_an_array_trains_each_line_of_a_file(
    cluster: Cluster, tmp_path: Path, tree_root: Path
) -> None:
    """As in docs/slurm.md, with fewer runs and one core for each."""
    page = (tree_root / "docs/slurm.md").read_text()
    (block,) = [
        text for text in re.findall(r"```bash\n(.*?)```", page, re.DOTALL) if "runs.txt" in text
    ]
    for old, new in (("0-99%50", "0-2%2"), ("task=2", "task=1"), ("JOB=100", "JOB=2")):
        assert old in block
        block = block.replace(old, new)
    lines = []
    for rate in (0.01, 0.02, 0.03, 0.04, 0.05):
        words = train_arguments(tmp_path, max_steps=2, cpu_threads="none", learning_rate=rate)
        place = words.index("--output_dir")
        lines.append(" ".join([*words[1:place], *words[place + 2 :]]))
    (tmp_path / "runs.txt").write_text("\n".join(lines) + "\n")
    package = {"PYTHONPATH": str(Path(mlbert.__file__).parents[1])}
    done = cluster.run("bash", "-c", block, cwd=tmp_path, environment=package)
    assert done.returncode == 0, done.stderr
    job = done.stdout.split()[-1]
    for index in range(3):
        cluster.wait_for_end(f"{job}_{index}")
    outputs = "".join(path.read_text() for path in tmp_path.glob("small_runs_*.txt"))
    for run in range(1, 6):
        assert f"run {run} ended with 1" in outputs, outputs
        log = read_log(tmp_path / f"runs/{run}/result_0.txt")
        assert log.value("opt_base_learning_rate") == run / 100
        assert log.value("threads_per_rank") == 1
    assert len(list((tmp_path / "runs").iterdir())) == 5


def test_user_error_ends_the_job_before_the_ranks_start(site: Site) -> None:
    jobs = [site.submit("-N2", **exports) for exports, *_ in USER_ERRORS]
    for job, (_, message, times) in zip(jobs, USER_ERRORS, strict=True):
        facts = site.cluster.wait_for_end(job)
        output = site.output(job)
        assert (facts["JobState"], facts["ExitCode"]) == ("FAILED", "2:0"), output
        assert output.count(message) == times, output
        assert "run 0 starts" not in output


def test_full_disk_under_logdir_is_a_one_line_error(site: Site, tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(logs)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")
    try:
        with contextlib.suppress(OSError):
            (logs / "everything").write_bytes(bytes(100_000))
        job = site.submit(LOGDIR=logs)
        assert site.cluster.wait_for_end(job)["ExitCode"] == "2:0"
        reason = "cannot be written to: it is full, or this user may not write there."
        *warnings, error = site.output(job).splitlines()
        assert error == f"error: LOGDIR={logs} {reason}"
        assert warnings == ["warning: training ends after 144 samples, before the first evaluation"]
        assert [path.name for path in logs.iterdir()] == ["everything"]
    finally:
        subprocess.run(["umount", logs], check=True)


@pytest.mark.slow
def test_cpu_cluster_trains_with_the_commands_of_its_readme(
    cluster: Cluster, tree_root: Path, tmp_path: Path
) -> None:
    short = (
        f"SYNTH_DATA=1 MAX_STEPS=4 WARMUP_STEPS=1 CPU_THREADS=1 CLEAR_CACHES=0 LOGDIR='{tmp_path}'"
    )
    line = f"set -eu; source env.sh; source config_cpu_4x1x8x1_demo.sh; {short} sbatch --parsable"
    line += f" --output='{tmp_path}/out' -N ${{DGXNNODES}} -t ${{WALLTIME}} run.sub"
    done = cluster.run(
        "bash", "-c", line, cwd=tree_root / "benchmarks/bert/implementations/cpu_cluster"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert cluster.wait_for_end(done.stdout.strip())["ExitCode"] == "1:0", (
        "random tokens cannot reach the target"
    )
    summary = json.loads((tmp_path / "run_0/summary.json").read_text())
    assert (summary["ranks"], summary["steps"]) == (4, 4), (tmp_path / "out").read_text()
    weights = tmp_path / "run_0/weights/model.safetensors"
    assert weights.stat().st_mode & 0o777 == 0o644
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")], (
        "temporary files must be removed"
    )


def test_published_command_needs_no_node_count(site: Site) -> None:
    node = site.cluster.nodes[-1]
    line = (
        f"source '{site.config}'; DGXNNODES=1 LR=fast sbatch --parsable -w {node} "
        f"--time=${{WALLTIME}} run.sub"
    )
    done = site.cluster.run("bash", "-c", line, cwd=site.config.parent)
    facts = site.cluster.wait_for_end(done.stdout.strip())
    assert (facts["NodeList"], facts["ExitCode"]) == (node, "2:0")
    assert "'fast' is not a number" in site.output(done.stdout.strip()), (
        "settings must be checked last"
    )


@pytest.mark.slow
def test_array_tasks_and_concurrent_jobs_are_separate_runs(site: Site) -> None:
    array = site.submit("--array=0-1", nodes=1, SEED="none")
    other = site.submit(nodes=1, LOGDIR=site.runs / "other")
    site.cluster.wait_for(lambda: (site.runs / "other/.run_0.job").exists(), 60, "claim of the run")
    rival = site.submit(nodes=1, LOGDIR=site.runs / "other")
    for job in (f"{array}_0", f"{array}_1", other, rival):
        assert site.cluster.wait_for_end(job)["JobState"] == "FAILED", (
            "random tokens cannot reach the target"
        )
    assert f"job {other} is writing run 0" in site.output(rival)
    logs = [
        read_log(site.runs / name)
        for name in ("out/result_0.txt", "out/result_1.txt", "other/result_0.txt")
    ]
    assert [log.status for log in logs] == ["aborted"] * 3
    assert logs[0].value("seed") != logs[1].value("seed")
    for folder in ("out/run_0", "out/run_1", "other/run_0"):
        assert json.loads((site.runs / folder / "summary.json").read_text())["steps"] == 12


@pytest.mark.slow
def test_jobs_of_an_array_run_one_after_another(site: Site, prepared_data: Path) -> None:
    """The folder of run 0 is finished when the second job starts."""
    array = site.submit("--array=0-1%1", nodes=1, **text_exports(site, prepared_data))
    for run in (0, 1):
        job = f"{array}_{run}"
        assert site.cluster.wait_for_end(job)["JobState"] == "COMPLETED", site.output(job)
        assert read_log(site.runs / f"out/result_{run}.txt").status == "success"
    assert not list((site.runs / "out").glob(".*")), "the jobs must remove their temporary files"


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("tensorflow") is None,
    reason="TensorFlow is not installed (the tf extra)",
)
def test_tensorflow_uses_one_process_per_node(
    site: Site, prepared_data: Path, tree_root: Path
) -> None:
    ours = tree_root / "benchmarks/bert/implementations"
    (site.config.parents[1] / "tensorflow2").symlink_to(ours / "tensorflow2")
    stub = "run_pretraining.py"
    (site.config.parent / stub).write_bytes((ours / "tf2_cpu_demo" / stub).read_bytes())
    exports = {
        "RECIPE": "tensorflow2",
        "OPTIMIZER": "lamb",
        "MAX_SEQUENCES_PER_PACK": 3,
        "DGXNGPU": 2,
        "LR": "0.02",
    }
    exports |= {"CHECK_COMPLIANCE": 1, "STEPS_PER_LOOP": 5}
    state, output = site.run(nodes=1, **(text_exports(site, prepared_data) | exports))
    assert (state, output.count("no errors")) == ("COMPLETED", 1), output
    log = read_log(site.runs / "out/result_0.txt")
    assert [log.value(key) for key in ("recipe", "ranks", "global_batch_size")] == [
        "tensorflow2",
        2,
        12,
    ]
    assert log.status == "success"


@pytest.mark.slow
def test_mosaic_main_trains_on_two_nodes(cluster: Cluster, tmp_path: Path, tree_root: Path) -> None:
    make_texts(tmp_path, tree_root)
    home = tree_root / "benchmarks/mosaic_bert"
    # These nodes have no GPUs.
    script = (home / "yamls/cloud/slurm.sub").read_text().replace(" --gpus-per-node=8", "")
    (tmp_path / "slurm.sub").write_text(script)
    words = ["model.name=mosaic_bert", "max_duration=4ba", "eval_interval=4ba", "save_folder=out"]
    package = {"PYTHONPATH": str(Path(mlbert.__file__).parents[1]), "PYTHON": sys.executable}
    submit = ["sbatch", "--parsable", "-N", "2", "--ntasks-per-node=1", "-t", "10", "slurm.sub"]
    done = cluster.run(
        *submit, home / "main.py", "main.yaml", *BASE, *words, cwd=tmp_path, environment=package
    )
    assert done.returncode == 0, done.stderr
    state = cluster.wait_for_end(done.stdout.strip())["JobState"]
    assert state == "COMPLETED", (tmp_path / f"slurm-{done.stdout.strip()}.out").read_text()
    summary = json.loads((tmp_path / "out/run_0/summary.json").read_text())
    assert (summary["ranks"], summary["status"], summary["samples"]) == (2, "success", 64)


def states(cluster: Cluster, job: str) -> set[str]:
    lines = cluster.run("scontrol", "--oneliner", "show", "job", job).stdout.splitlines()
    return {
        word.removeprefix("JobState=")
        for line in lines
        for word in line.split()
        if word.startswith("JobState=")
    }


def test_more_jobs_than_an_array_may_have_are_refused_before_any(
    cluster: Cluster, tree_root: Path, tmp_path: Path
) -> None:
    launch = tree_root / "benchmarks/bert/implementations/pytorch/launch"
    command = ["mlbert", "prepare", "pack", "--input", tmp_path, "--out", tmp_path / "out"]
    done = cluster.run(launch / "prepare_data.sh", "--slurm", "1002", "--", *command)
    reason = "this Slurm allows arrays of at most 1001 jobs (MaxArraySize)"
    assert (done.returncode, done.stderr) == (2, f"error: --slurm 1002: {reason}.\n")
    assert done.stdout == ""


@pytest.mark.slow
def test_a_killed_array_makes_the_bytes_of_one_process(
    cluster: Cluster, tree_root: Path, tmp_path: Path
) -> None:
    draw = random.Random(0)
    (tmp_path / "texts").mkdir()
    for number in range(8):  # large enough to be tasks by themselves
        texts = (" ".join(draw.choices(WORDS, k=draw.randrange(1, 6000))) for _ in range(1000))
        (tmp_path / f"texts/{number}.jsonl").write_text(json_lines(texts))
    convert = [
        sys.executable,
        tree_root / "benchmarks/mosaic_bert/common/convert_dataset.py",
        "--dataset",
        "text",
    ]
    convert += [
        "--path",
        tmp_path / "texts",
        "--splits",
        "train",
        "val",
        "--concat_tokens",
        "64",
        "--out_root",
    ]
    draw = random.Random(time.time_ns())
    killed = 0
    script = [
        tree_root / "benchmarks/bert/implementations/pytorch/launch/prepare_data.sh",
        "--slurm",
        "7",
        "--workers",
        "1",
        "--",
    ]
    done = cluster.run(*script, *convert, tmp_path / "many", environment=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    jobs = [
        line.split()[1].rstrip(":") for line in done.stdout.splitlines() if line.startswith("job ")
    ]
    assert len(jobs) == 3  # two passes and the merge
    deadline = time.monotonic() + 400
    while states(cluster, jobs[-1]) <= {"PENDING", "RUNNING", "COMPLETING"}:
        assert time.monotonic() < deadline
        running = cluster.running("convert_dataset.py")
        if killed < KILLS and running and draw.random() < 0.2:
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(running), signal.SIGKILL)
                killed += 1
        time.sleep(draw.uniform(0, 0.5))
    assert [states(cluster, job) for job in jobs] == [{"COMPLETED"}] * 3
    assert killed == KILLS
    subprocess.run([*convert, tmp_path / "one"], check=True, capture_output=True, timeout=300)
    assert "train/shard.00002.mds" in tree(tmp_path / "one")
    assert tree(tmp_path / "many") == tree(tmp_path / "one")
