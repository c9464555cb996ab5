"""The launchers' exact command lines, in jobs and over ssh and mpirun.

Stand-ins replace missing engines.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import training_settings
from mlbert.config.shell import LaunchConfig
from programs import assert_refused, run_quietly, write_program

# Records its arguments and the exports that differ between runs,
# then acts as the test's exports request.
STAND_IN = """#!{python}
import json, os, signal, sys
from pathlib import Path
name = Path(sys.argv[0]).name
keep = ("EXPERIMENT", "SEED", "RESUME", "CACHES_CLEARED", "MASTER_ADDR", "MASTER_PORT",
        "PYTHONPATH", "MLBERT_IMAGE_DIGEST")
exports = {{name: os.environ[name] for name in keep if name in os.environ}}
note = dict(program=name, words=sys.argv[1:], exports=exports)
with open(os.environ["NOTES"], "a") as file:
    file.write(json.dumps(note) + "\\n")
line = " ".join(sys.argv[1:])
if os.environ.get("WARN_AT", "nothing") in line:
    # The job's shell is the grandparent of this process.
    with open(f"/proc/{{os.getppid()}}/stat") as file:
        os.kill(int(file.read().rpartition(")")[2].split()[1]), signal.SIGUSR1)
if "requeue" in sys.argv:
    sys.exit("requeue is refused")
if line.startswith("image inspect"):
    print("registry/bert@sha256:5eed")
if name == "scontrol":
    answers = dict(
        hostnames="n1\\nn2",
        node="NodeAddr=10.0.0.1",
        config="TaskPlugin = task/affinity",
        job=os.environ.get("JOB_" + sys.argv[-1], "JobState=RUNNING"),
    )
    answer = next(answer for word, answer in answers.items() if word in sys.argv)
    if "error" in answer or "not found" in answer:
        sys.exit(answer)
    print(answer)
if name == "srun" and "--mpi=list" in line:
    print("pmi2 none")
if "run_and_time.sh" in line:
    run = Path(os.environ["LOGDIR"], "run_" + os.environ["EXPERIMENT"])
    run.mkdir(parents=True, exist_ok=True)
    status = int(os.environ.get("STATUS", "0"))
    if os.environ.get("RUN_STOP"):
        line = dict(key="run_stop", metadata=json.loads(os.environ["RUN_STOP"]))
        result = run.with_name(run.name.replace("run_", "result_") + ".txt")
        result.write_text(json.dumps(line) + "\\n")
    elif status < 2:
        (run / "summary.json").write_text("{{}}")
    sys.exit(status)
"""
# Takes the options of `exec` that the launchers use, and runs the command without an image.
APPTAINER = r"""#!/bin/bash
set -euo pipefail
echo "apptainer $*" >>"${APPTAINER_CALLS}"
[[ "$1" == exec ]]
shift
while [[ "$1" == --* ]]; do
    case "$1" in
    --bind)
        [[ -e "${2%%:*}" ]] || { echo "FATAL: ${2%%:*} does not exist" >&2; exit 255; }
        shift 2
        ;;
    --pwd) cd "$2"; shift 2 ;;
    --no-home | --writable-tmpfs | --nv) shift ;;
    *) echo "FATAL: unknown option $1" >&2; exit 1 ;;
    esac
done
[[ -f "$1" ]] || { echo "FATAL: no image $1" >&2; exit 255; }
shift
exec "$@"
"""

PROGRAMS = ("srun", "scontrol", "squeue", "docker", "ssh", "mpirun", "enroot")

# The answer to GRADIENT_CLIPING.
MISSPELT = (
    "warning: GRADIENT_CLIPING is exported but is not a setting; did you mean GRADIENT_CLIPPING?"
)

UNREACHABLE = "slurm_load_jobs error: Unable to contact slurm controller (connect failure)"


class FakeCluster:
    """A tree with a space in its path, stand-ins for the engines, and their recorded calls."""

    def __init__(self, root: Path, tree_root: Path) -> None:
        implementations = root / "a tree/benchmarks/bert/implementations"
        self.system = implementations / "any"
        self.system.mkdir(parents=True)
        ours = tree_root / "benchmarks/bert/implementations"
        (implementations / "pytorch").symlink_to(ours / "pytorch")
        (self.system / "run.sub").write_bytes((ours / "cpu_demo/run.sub").read_bytes())
        (
            self.system / "run_pretraining.py"
        ).touch()  # run.sub gets the settings from it before the ranks start
        self.launch = implementations / "pytorch/launch"
        self.logs = root / "logs"
        self.programs = root / "bin"
        self.notes = root / "notes"
        for name in PROGRAMS:
            write_program(self.programs / name, STAND_IN.format(python=sys.executable))
        self.exports = {
            "DGXSYSTEM": "any_2x4x4x1",
            "CONFIG_FILE": self.system / "config_any_2x4x4x1.sh",
        }
        self.exports |= {"DGXNNODES": 2, "DGXNGPU": 4, "RECIPE": "any", "LOGDIR": self.logs}
        self.exports |= {"CLEAR_CACHES": 0, "CHECK_COMPLIANCE": 0}

    @property
    def image(self) -> Path:
        """Create an image file. A job in a container gets a stand-in for the report too."""
        path = self.logs.with_name("bert.sqsh")
        path.touch()
        return path

    def start(
        self, launcher: str, *words: str, **exports: object
    ) -> subprocess.CompletedProcess[str]:
        """Start run.sub, which is in the system's folder, or another launcher."""
        program = launcher if launcher == "run.sub" else self.launch / launcher
        own = {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "NOTES": self.notes,
            "VIRTUAL_ENV": "none",
        }
        environment = {
            name: str(value) for name, value in {**own, **self.exports, **exports}.items()
        }
        return run_quietly("bash", program, *words, env=environment, cwd=self.system)

    def job(self, **exports: object) -> subprocess.CompletedProcess[str]:
        """Run run.sub as Slurm would."""
        slurm = {"SLURM_JOB_ID": 7, "SLURM_JOB_NUM_NODES": 2, "SLURM_JOB_NODELIST": "n[1-2]"}
        return self.start("run.sub", **(slurm | exports))

    def calls(self, program: str, word: str = "") -> list[dict]:
        """Return the recorded calls of a program that have an argument containing ``word``."""
        notes = [json.loads(line) for line in self.notes.read_text().splitlines()]
        return [n for n in notes if n["program"] == program and any(word in w for w in n["words"])]


@pytest.fixture
def cluster(tmp_path: Path, tree_root: Path) -> FakeCluster:
    return FakeCluster(tmp_path, tree_root)


def test_job_starts_each_run_on_all_ranks_with_its_own_seed(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    """It drops the caches of every node before each run, and leaves no temporary files."""
    (scratch := tmp_path / "tmp").mkdir()
    done = cluster.job(
        NEXP=3, SEED=10, SRUN_ARGS="--gres=gpu:4 --network=sharp", CLEAR_CACHES=1, TMPDIR=scratch
    )
    assert list(scratch.iterdir()) == []
    assert [path.name for path in cluster.logs.iterdir() if path.name.startswith(".")] == []
    assert len(cluster.calls("srun", "drop_caches.sh")) == 3
    runs = cluster.calls("srun", "run_and_time.sh")
    assert [run["exports"]["CACHES_CLEARED"] for run in runs] == ["true"] * 3
    assert [run["exports"]["EXPERIMENT"] for run in runs] == ["0", "1", "2"], done.stderr
    assert [run["exports"]["SEED"] for run in runs] == ["10", "11", "12"]
    assert [run["exports"]["RESUME"] for run in runs] == ["0", "0", "0"]
    for run in runs:
        assert run["words"] == [
            "--gres=gpu:4",
            "--network=sharp",
            "--mpi=pmi2",
            "--label",
            "--kill-on-bad-exit=1",
            "--cpu-bind=none",
            "--ntasks=8",
            "--ntasks-per-node=4",
            str(cluster.launch / "run_and_time.sh"),
        ]
        assert run["exports"]["MASTER_ADDR"] == "10.0.0.1"
        assert run["exports"]["MASTER_PORT"] == str(15000 + 7 * 31)
        implementations = cluster.launch.parents[1]
        assert (
            run["exports"]["PYTHONPATH"]
            == f"{implementations}/pytorch:{implementations}/tensorflow2"
        )
    assert all(
        "--gres=gpu:4" in call["words"]
        for call in cluster.calls("srun")
        if "--mpi=list" not in call["words"]
    )


def test_tensorflow_job_has_one_task_per_node_and_mounts_its_files(cluster: FakeCluster) -> None:
    (weights := cluster.logs.with_name("weights")).mkdir()
    (weights / "model.ckpt-28252.index").touch()
    data = dict.fromkeys(("DATADIR_PHASE2", "EVALDIR"), "/data/parts")
    files = {"INPUT_FILES": "/data/parts/part-*,/more/part-*", "EVAL_FILES": "gs://bucket/eval_10k"}
    start = weights / "model.ckpt-28252"
    cluster.job(
        CONT=cluster.image,
        RECIPE="tensorflow2",
        SLURM_CPUS=32,
        INIT_CHECKPOINT=start,
        **data,
        **files,
    )
    (run,) = cluster.calls("srun", "run_and_time.sh")
    assert {"--cpus-per-task=32", "--ntasks=2", "--ntasks-per-node=1"} <= set(run["words"])
    (mounts,) = [word for word in run["words"] if word.startswith("--container-mounts=")]
    mounted = [cluster.system.parents[3], "/data/parts", weights, cluster.logs, "/more"]
    assert mounts == f"--container-mounts={','.join(f'{folder}:{folder}' for folder in mounted)}"


def test_container_is_created_once_per_node_and_reused_by_name(cluster: FakeCluster) -> None:
    data = {"DATADIR_PHASE2": "/data/a b/train", "EVALDIR": "/data/eval"}
    data["CONT_MOUNTS"] = "/dev/infiniband:/dev/infiniband"
    cluster.job(CONT=cluster.image, SLURM_MPI_TYPE="none", SLURM_CPUS=32, **data)
    tree = cluster.system.parents[3]
    container = [
        "--container-name=mlbert_7",
        f"--container-mounts={tree}:{tree},/data/a b/train:/data/a b/train,/data/eval:/data/eval,"
        f"{cluster.logs}:{cluster.logs},/dev/infiniband:/dev/infiniband",
        f"--container-workdir={cluster.system}",
        "--container-env=MASTER_ADDR,MASTER_PORT,PYTHONPATH",
        "--no-container-mount-home",
        "--container-remap-root",
        "--container-writable",
    ]
    once = ["--mpi=none", "--ntasks=2", "--ntasks-per-node=1"]
    alone = ["--mpi=none", "--nodes=1", "--ntasks=1"]
    show = ["python3", f"{cluster.system}/run_pretraining.py", "--print-config"]
    report = ["python3", "-m", "mlbert", "report", str(cluster.logs)]
    ranks = [
        "--mpi=none",
        "--label",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=8",
        "--cpu-bind=none",
    ]
    assert [call["words"] for call in cluster.calls("srun")] == [
        [*once, f"--container-image={cluster.image}", *container, "true"],
        [*once, *container, str(cluster.launch / "check_node.sh")],
        [*alone, *container, *show],
        [
            *ranks,
            "--ntasks=8",
            "--ntasks-per-node=4",
            *container,
            str(cluster.launch / "run_and_time.sh"),
        ],
        [*alone, *container, *report],
        [*once, "enroot", "remove", "--force", "pyxis_mlbert_7"],
    ]


def test_an_apptainer_image_runs_each_rank_without_pyxis(cluster: FakeCluster) -> None:
    image = cluster.image.rename(cluster.image.with_name("bert.sif"))
    calls = write_apptainer(cluster)
    cluster.job(CONT=image, SLURM_MPI_TYPE="none", SLURM_CPUS=32, APPTAINER_CALLS=calls)
    tree = cluster.system.parents[3]
    inside = ["apptainer", "exec", "--no-home", "--writable-tmpfs", "--pwd", str(cluster.system)]
    inside += ["--bind", f"{tree}:{tree}", "--bind", f"{cluster.logs}:{cluster.logs}", str(image)]
    called = [call["words"] for call in cluster.calls("srun")]
    assert called[0] == ["--mpi=none", "--ntasks=2", "--ntasks-per-node=1", *inside, "true"]
    (run,) = cluster.calls("srun", "run_and_time.sh")
    assert run["words"][-len(inside) - 1 :] == [*inside, str(cluster.launch / "run_and_time.sh")]
    assert run["exports"]["MLBERT_IMAGE_DIGEST"].startswith("sha256:")
    assert not [words for words in called if "enroot" in words or "--container" in str(words)]


@pytest.mark.slow
def test_runs_in_an_apptainer_image_on_one_machine(
    cluster: FakeCluster, tmp_path: Path, tree_root: Path
) -> None:
    image = cluster.image.rename(cluster.image.with_name("bert.sif"))
    image.write_bytes(b"image")
    calls = write_apptainer(cluster)
    system = tree_root / "benchmarks/bert/implementations/cpu_demo"
    exports = training_settings.exports(tmp_path) | {
        "CONFIG_FILE": system / "config_cpu_1x1x32x1_demo.sh",
        "DGXNNODES": 1,
        "DGXNGPU": 1,
        "MAX_STEPS": 2,
        "NEXP": 1,
        "CLEAR_CACHES": 0,
        "CHECK_COMPLIANCE": 0,
        "LOGDIR": cluster.logs,
        "CONT": image,
        "APPTAINER_CALLS": calls,
        "RECIPE": "packed_lamb",
    }
    done = cluster.start("run_with_apptainer.sh", **exports)
    assert done.returncode == 1, "the target is missed"
    assert "run 0 ended with status 1" in done.stdout, done.stdout + done.stderr
    log = (cluster.logs / "result_0.txt").read_text()
    assert f'"image_digest", "value": "sha256:{hashlib.sha256(b"image").hexdigest()}"' in log
    called = calls.read_text()
    for program in ("check_node.sh", "run_and_time.sh", "-m mlbert report"):
        assert program in called
    for wrong, words in (
        ({"CONT": "bert.sqsh"}, "CONT=bert.sqsh is not a .sif"),
        ({"CONT": "none.sif"}, "none.sif is not a readable file here"),
        ({"DGXNNODES": 2}, "DGXNNODES=2, but this starts one node"),
    ):
        refused = cluster.start("run_with_apptainer.sh", **(exports | wrong))
        assert_refused(refused, words)


def write_apptainer(cluster: FakeCluster) -> Path:
    """Put `APPTAINER` on the path, and return the file of its calls."""
    write_program(cluster.programs / "apptainer", APPTAINER)
    return cluster.logs.parent / "apptainer_calls"


def test_a_relative_image_file_is_not_looked_up_in_a_registry(cluster: FakeCluster) -> None:
    cluster.image.rename(cluster.system / "bert.sqsh")
    cluster.job(CONT="bert.sqsh")
    (start,) = cluster.calls("srun", "--container-image")
    assert f"--container-image={cluster.system}/bert.sqsh" in start["words"]
    cluster.job(CONT="registry.example#nvidia/bert:1")
    start = cluster.calls("srun", "--container-image")[-1]
    assert "--container-image=registry.example#nvidia/bert:1" in start["words"]


def test_what_a_launcher_refuses(cluster: FakeCluster) -> None:
    docker = "run_with_docker.sh"
    assert_refused(cluster.start(docker, DGXNNODES=1), "CONT is not set")
    assert_refused(cluster.start(docker, "--max_steps", "5", DGXNNODES=1, CONT="bert:1"), "")
    assert_refused(
        cluster.start("run_multinode.sh", HOSTS="n1"),
        "HOSTS names 1 hosts, the config has DGXNNODES=2",
    )
    for image in ("/images/none.sqsh", "none.sqsh", "./none", f"{cluster.logs.parent}"):
        assert_refused(cluster.job(CONT=image), f"CONT={image} is not a readable file here.")
    assert_refused(cluster.start("run.sub", CONT="none.sqsh"), "CONT=none.sqsh is not a readable")


@pytest.mark.parametrize(
    ("status", "num_runs"), [(3, 1), (1, 3)], ids=["failed rank", "missed target"]
)
def test_only_a_failed_rank_stops_further_runs(
    cluster: FakeCluster, status: int, num_runs: int
) -> None:
    assert cluster.job(NEXP=3, STATUS=status).returncode == status
    assert len(cluster.calls("srun", "run_and_time.sh")) == num_runs


@pytest.mark.parametrize(
    ("engine", "exit_code", "reason", "status"),
    [
        ("srun", 137, "rank 1 on n2 died after step 4", 3),
        ("srun", 143, "rank 0 on n1 is silent after step 4 (30 s)", 3),
        ("srun", 137, "SIGTERM", 143),
        ("srun", 139, None, 3),
        ("srun", 2, None, 2),
        ("srun", 143, 'rank 1 on n2 failed after step 0: "x": is none. [data.too-small]', 2),
        ("srun", 143, "rank 1 on n2 failed after step 4: IndexError: x[data.i]", 3),
        ("srun", 137, "success", 0),
        ("mpirun", 137, None, 3),
        ("mpirun", 2, None, 2),
        ("mpirun", 143, None, 143),
        ("mpirun", 143, "SIGTERM", 143),
        (
            "mpirun",
            3,
            "rank 1 on n2 failed after step 4: data: is damaged. Restore it. [data.damaged]",
            2,
        ),
    ],
)
def test_launcher_exits_with_the_runs_status(
    cluster: FakeCluster, engine, exit_code, reason, status
) -> None:
    run_stop = (
        {"status": "success"} if reason == "success" else {"status": "aborted", "reason": reason}
    )
    exports = {"STATUS": exit_code} | ({"RUN_STOP": json.dumps(run_stop)} if reason else {})
    if engine == "srun":
        done = cluster.job(CONT=cluster.image, **exports)
    else:
        done = cluster.start("run_multinode.sh", "--mpirun", HOSTS="n1,n2", **exports)
    assert done.returncode == status, done.stdout + done.stderr
    assert f"run 0 ended with status {status}." in done.stdout
    assert (status != 0) or "writing its results failed with status 137" in done.stdout


@pytest.mark.parametrize(
    ("story", "is_lost", "status"),
    [
        ("died after step 4", True, 3),
        ("is silent after step 4 (30 s)", True, 3),
        ("hangs after step 4 (READ, 26 s)", True, 3),
        ("failed after step 4: OSError: no such device", False, 3),
        (
            "failed after step 0: it contains 10 examples, but 20 are requested [data.examples]",
            False,
            2,
        ),
    ],
)
def test_only_a_lost_rank_excludes_its_node(
    cluster: FakeCluster, story: str, is_lost: bool, status: int
) -> None:
    """n2 is a spare for n1."""
    run_stop = json.dumps({"reason": f"rank 1 on n1 {story}", "status": "aborted"})
    done = cluster.job(STATUS=3, RUN_STOP=run_stop, DGXNNODES=1, SPARES=1)
    assert done.returncode == status, done.stderr
    assert (f"n1 is excluded from this job: rank 1 on n1 {story}." in done.stdout) == is_lost
    assert ("continues on n2 from its beginning" in done.stdout) == is_lost
    runs = cluster.calls("srun", "run_and_time.sh")
    excluded = [
        [node for node in ("n1", "n2") if f"--exclude={node}" in run["words"]] for run in runs
    ]
    if is_lost:
        assert excluded == [["n2"], ["n1"]]
    else:
        assert excluded == [["n2"]]
    assert cluster.calls("scontrol", "requeue") == []


@pytest.mark.parametrize("name", ["SPARES", "MAX_RESTARTS"])
def test_counts_of_nodes_and_restarts_have_the_limits_of_their_settings(
    cluster: FakeCluster, name: str
) -> None:
    (most,) = [
        limit.le
        for limit in LaunchConfig.model_fields[name.lower()].metadata
        if hasattr(limit, "le")
    ]
    for value, is_valid in ((most, True), (most + 1, False), (-1, False), ("08", False)):
        error = f"{name}={value} is not a whole number from 0 to {most}."
        exports = {name: value}
        assert (error in cluster.job(**exports).stderr) != is_valid


def test_signal_before_the_ranks_start_requeues_the_job_once(cluster: FakeCluster) -> None:
    done = cluster.job(WARN_AT="check_node.sh")
    assert [call["words"] for call in cluster.calls("scontrol", "requeue")] == [["requeue", "7"]]
    assert "requeueing; run 0 continues from its beginning." in done.stdout
    assert cluster.calls("srun", "run_and_time.sh") == []
    assert done.returncode == 2
    assert "this job may not be requeued. Continue with: RESUME=1 sbatch" in done.stderr
    done = cluster.job(WARN_AT="check_node.sh", SLURM_RESTART_COUNT=1)
    assert_refused(done, "warned of the end twice without a new checkpoint")
    assert len(cluster.calls("scontrol", "requeue")) == 1
    array = {"SLURM_ARRAY_JOB_ID": 7, "SLURM_ARRAY_TASK_ID": 1}
    cluster.job(WARN_AT="check_node.sh", **array)
    assert cluster.calls("scontrol", "requeue")[-1]["words"] == ["requeue", "7_1"]


@pytest.mark.parametrize("launcher", ["run.sub", "run_with_docker.sh"])
def test_existing_result_is_not_overwritten(cluster: FakeCluster, launcher: str) -> None:
    existing = cluster.system.parents[3] / "results/test/bert/result_1.txt"
    existing.parent.mkdir(parents=True)
    existing.write_text("from another run")
    exports = {"NEXP": 2, "COLLECT_RESULTS": 1, "MLPERF_SUBMISSION_PLATFORM": "test"}
    if launcher == "run.sub":
        done = cluster.job(**exports)
    else:
        done = cluster.start(launcher, **exports, CONT="bert:1", DGXNNODES=1)
    assert_refused(done, f"{existing} already exists and is not overwritten")
    assert not cluster.notes.exists(), "something was started"
    assert existing.read_text() == "from another run"


def test_image_digest_reaches_the_ranks(cluster: FakeCluster, tmp_path: Path) -> None:
    image = tmp_path / "bert.sqsh"
    sidecar = tmp_path / "bert.sqsh.sha256"
    image.write_bytes(b"squashed")
    for digest in (hashlib.sha256(b"squashed").hexdigest(), "c0ffee"):
        cluster.job(CONT=image)
        assert (
            cluster.calls("srun", "run_and_time.sh")[-1]["exports"]["MLBERT_IMAGE_DIGEST"]
            == f"sha256:{digest}"
        )
        sidecar.write_text("c0ffee  bert.sqsh\n")
        shutil.rmtree(cluster.logs)


def test_restarted_job_collects_finished_runs(cluster: FakeCluster) -> None:
    """The first run ended well before it wrote a summary."""
    line = json.dumps({"key": "run_stop", "metadata": {"status": "success"}}) + "\n"
    for i, (log, status) in enumerate(((line, None), ("a log", "success"), ("a log", "aborted"))):
        (run := cluster.logs / f"run_{i}").mkdir(parents=True)
        if status:
            (run / "summary.json").write_text(json.dumps({"status": status}, indent=2))
        (cluster.logs / f"result_{i}.txt").write_text(log)
    collect = {
        "COLLECT_RESULTS": 1,
        "MLPERF_SUBMISSION_PLATFORM": "test",
        "SLURM_RESTART_COUNT": 1,
        "TIMED": 1,
    }
    collect["CONT"] = cluster.image
    done = cluster.job(NEXP=2, **collect)
    assert (done.returncode, "run 0 is finished." in done.stdout) == (0, True)
    results = cluster.system.parents[3] / "results/test/bert"
    assert [(results / f"result_{i}.txt").read_text() for i in range(2)] == [line, "a log"]
    assert cluster.job(NEXP=3, **collect).returncode == 1, "the third run missed its target"
    assert cluster.calls("srun", "run_and_time.sh") == []


def write_lock(cluster: FakeCluster, owner: str) -> Path:
    """Write the lock of run 0 as job `owner` does; `sleep` returns at once."""
    write_program(cluster.programs / "sleep", '#!/bin/sh\necho "sleep $*" >>"${NOTES}.sleep"\n')
    cluster.logs.mkdir(exist_ok=True)
    lock = cluster.logs / ".run_0.job"
    lock.write_text(owner)
    return lock


@pytest.mark.parametrize(
    ("owner", "answer", "error"),
    [
        ("5\n", "JobState=RUNNING", "error: job 5 is writing run 0 in "),
        ("5\n", "JobState=COMPLETING", "error: job 5 is writing run 0 in "),
        ("5\n", "JobState=SUSPENDED", "error: job 5 is writing run 0 in "),
        ("5\n", UNREACHABLE, f"whether job 5 is still writing run 0: {UNREACHABLE}"),
        ("", UNREACHABLE, "whether job ? is still writing run 0: the lock names no job."),
    ],
)
def test_a_run_is_not_taken_from_a_job_that_may_be_writing_it(
    cluster: FakeCluster, owner: str, answer: str, error: str
) -> None:
    lock = write_lock(cluster, owner)
    done = cluster.job(JOB_5=answer)
    assert_refused(done, error)
    assert lock.read_text() == owner
    assert cluster.calls("srun", "run_and_time.sh") == []
    waits = 12 if "unknown whether" in done.stderr else 0
    assert done.stdout.count("waiting to learn whether job ") == waits


@pytest.mark.parametrize(
    ("owner", "answer"),
    [
        ("5\n", "JobState=FAILED"),
        ("5\n", "JobState=PENDING"),
        ("5\n", "slurm_load_jobs error: Invalid job id specified"),
        ("5_1\n", "Job 5_1 not found"),  # other jobs of the array are known
        ("7\n", UNREACHABLE),  # this job, before a restart
    ],
)
def test_a_run_of_a_job_that_is_over_is_taken(
    cluster: FakeCluster, owner: str, answer: str
) -> None:
    lock = write_lock(cluster, owner)
    exports = {f"JOB_{owner.strip()}": answer}
    done = cluster.job(**exports)
    assert len(cluster.calls("srun", "run_and_time.sh")) == 1, done.stderr
    assert not lock.exists()


def test_only_one_of_two_jobs_takes_a_run(cluster: FakeCluster) -> None:
    lock = write_lock(cluster, "5\n")
    write_program(cluster.programs / "sleep", f"#!/bin/sh\necho 8 >'{lock}'\n")  # job 8 is faster
    done = cluster.job(JOB_5="JobState=FAILED")
    assert_refused(done, "job 8 is writing run 0 in ")
    assert lock.read_text() == "8\n"


def test_a_job_that_slurm_ends_starts_no_step(cluster: FakeCluster) -> None:
    """n2 is a spare; Slurm's signal arrives after the end of the ranks' step."""
    run_stop = json.dumps({"reason": "rank 1 on n1 died after step 4", "status": "aborted"})
    ending = {"DGXNNODES": 1, "SPARES": 1, "STATUS": 3, "RUN_STOP": run_stop}
    # The job's state changes while the ranks run.
    srun = cluster.programs / "srun"
    text = srun.read_text().replace(
        'if "run_and_time.sh" in line:\n',
        'if "run_and_time.sh" in line:\n    Path(os.environ["NOTES"] + ".ending").touch()\n',
    )
    srun.write_text(text)
    scontrol = cluster.programs / "scontrol"
    changed = 'if "job" in sys.argv and Path(os.environ["NOTES"] + ".ending").exists():\n'
    changed += '    sys.exit(print("JobState=COMPLETING"))\nif name == "scontrol":\n'
    scontrol.write_text(scontrol.read_text().replace('if name == "scontrol":\n', changed))
    done = cluster.job(CONT=cluster.image, **ending)
    assert done.returncode == 3, done.stderr
    assert "is excluded" not in done.stdout
    assert cluster.calls("srun")[-1]["words"][-1].endswith("run_and_time.sh")


def test_jobs_of_an_array_check_the_folder_of_their_own_run(cluster: FakeCluster) -> None:
    array = {"SLURM_ARRAY_JOB_ID": 5, "SLURM_ARRAY_TASK_ID": 3, "CONT": cluster.image}
    assert cluster.job(**array, NEXP=10).returncode == 0
    (check,) = cluster.calls("srun", "--print-config")
    assert check["exports"]["EXPERIMENT"] == "3"
    assert [call["exports"]["EXPERIMENT"] for call in cluster.calls("srun", "run_and_time.sh")] == [
        "3"
    ]
    (report,) = cluster.calls("srun", "report")
    assert report["words"][-1] == f"{cluster.logs}/result_3.txt", "others may be unfinished"
    asked = {call["words"][-1] for call in cluster.calls("scontrol", "job")}
    assert asked == {"5_3"}, "the number alone may be that of the whole array"


def test_a_finished_later_run_is_refused_before_the_first(cluster: FakeCluster) -> None:
    folder = cluster.logs / "run_2"
    folder.mkdir(parents=True)
    (folder / "summary.json").write_text("{}")
    done = cluster.job(NEXP=3)
    assert_refused(done, f"{folder}: contains a finished run.")
    done = cluster.start("run_multinode.sh", "--mpirun", NEXP=3, HOSTS="n1,n2")
    assert_refused(done, f"{folder}: contains a finished run.")
    assert cluster.calls("srun", "run_and_time.sh") == cluster.calls("mpirun") == []


def test_docker_runs_every_experiment_in_one_container(cluster: FakeCluster) -> None:
    words = {
        "DGXNNODES": 1,
        "NEXP": 2,
        "CONT": "bert:1",
        "SEED": 3,
        "DOCKER_ARGS": "--shm-size=64g",
    }
    done = cluster.start("run_with_docker.sh", **words)
    calls = [call["words"] for call in cluster.calls("docker")]
    assert [call[0] for call in calls] == [
        "run",
        "image",
        "exec",
        "exec",
        "exec",
        "exec",
        "container",
    ], done.stderr
    tree = cluster.system.parents[3]
    started = calls[0]
    assert started[started.index("--volume") + 1] == f"{tree}:{tree}"
    assert f"{cluster.logs}:{cluster.logs}" in started
    assert started[-3:] == ["bert:1", "sleep", "infinity"]
    assert "--shm-size=64g" in started
    name = started[started.index("--name") + 1]
    runs = cluster.calls("docker", "run_and_time.sh")
    assert [run["exports"]["SEED"] for run in runs] == ["3", "4"]
    for run in runs:
        assert run["words"][-2:] == [name, str(cluster.launch / "run_and_time.sh")]
        assert run["exports"]["MLBERT_IMAGE_DIGEST"] == "registry/bert@sha256:5eed"
        forwarded = {run["words"][i + 1] for i, word in enumerate(run["words"]) if word == "--env"}
        assert {"SEED", "EXPERIMENT", "RECIPE", "LOGDIR", "CONFIG_FILE"} <= forwarded
        assert {"PYTHONPATH", "MLBERT_IMAGE_DIGEST"} <= forwarded
    assert calls[-1] == ["container", "rm", "--force", name]
    assert done.returncode == 0


@pytest.mark.parametrize("launcher", ["run_with_docker.sh", "run_multinode.sh"])
def test_help_needs_no_config(cluster: FakeCluster, launcher: str) -> None:
    del cluster.exports["CONFIG_FILE"]
    done = cluster.start(launcher, "--help")
    assert (done.returncode, done.stderr) == (0, "")
    assert f"../pytorch/launch/{launcher}" in done.stdout
    assert not any(line.startswith("#") for line in done.stdout.splitlines())


def test_without_permission_to_drop_caches_sync_is_not_run(cluster: FakeCluster) -> None:
    for name, text in {"sync": 'touch "${NOTES}"', "sudo": "exit 1"}.items():
        write_program(cluster.programs / name, f"#!/bin/bash\n{text}\n")
    # As an ordinary user, who cannot write root's file.
    words = (
        ["setpriv", "--reuid=65534", "--clear-groups", "--inh-caps=-all"]
        if os.geteuid() == 0
        else []
    )
    environ = {"PATH": f"{cluster.programs}:/usr/bin:/bin", "NOTES": str(cluster.notes)}
    program = (cluster.launch / "drop_caches.sh").read_text()
    done = run_quietly(*words, "bash", input=program, env=environ, cwd="/")
    assert done.returncode == 1
    assert "Page cache not cleared" in done.stderr
    assert not cluster.notes.exists()


@pytest.fixture
def checking_cluster(cluster: FakeCluster, tree_root: Path, tmp_path: Path) -> FakeCluster:
    """Return a cluster with the real trainer and complete settings."""
    demo = tree_root / "benchmarks/bert/implementations/cpu_demo"
    (cluster.system / "run_pretraining.py").write_bytes((demo / "run_pretraining.py").read_bytes())
    Path(str(cluster.exports["CONFIG_FILE"])).touch()
    cluster.exports |= training_settings.exports(tmp_path) | {
        "HOSTS": "n1,n2",
        "PYTHON": sys.executable,
    }
    return cluster


def test_run_sub_checks_settings_before_it_is_submitted_and_in_the_job(
    checking_cluster: FakeCluster,
) -> None:
    cluster = checking_cluster
    assert_refused(cluster.start("run.sub", BATCHSIZE=15), "BATCHSIZE")
    done = cluster.start(
        "run.sub", GRADIENT_CLIPING="x", SPARES=1, WALLTIME=90, CONT="/nodes/only.sqsh"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("no mistake found. Submit with: sbatch -N 3 -t 90 run.sub\n")
    assert MISSPELT in done.stderr.splitlines()
    assert not cluster.notes.exists(), "something was started"
    done = cluster.job(GRADIENT_CLIPING="x")
    assert MISSPELT in done.stderr.splitlines()
    assert cluster.calls("srun", "run_and_time.sh")


def test_staged_data_is_copied_on_every_node_and_mounted(cluster: FakeCluster) -> None:
    (relative := cluster.system / "sets").mkdir()
    cluster.job(CONT=cluster.image, STAGE_DIR="/disk", DATADIR_PHASE2="/data/train", EVALDIR="sets")
    copied, of_evaluation = cluster.calls("srun", "stage.sh")
    assert copied["words"][-2:] == ["/data/train", "/disk/data/train"]
    assert of_evaluation["words"][-2:] == [str(relative), f"/disk{relative}"]
    assert {"--ntasks=2", "--ntasks-per-node=1"} <= set(copied["words"])
    (run,) = cluster.calls("srun", "run_and_time.sh")
    (mounts,) = [word for word in run["words"] if word.startswith("--container-mounts=")]
    assert "/disk/data/train:/disk/data/train" in mounts
    assert ",/data/train:" not in mounts


def test_a_set_inside_the_other_is_staged_with_it(cluster: FakeCluster, tmp_path: Path) -> None:
    sets = {"DATADIR_PHASE2": tmp_path / "set/train", "EVALDIR": tmp_path / "set"}
    done = cluster.job(CONT=cluster.image, STAGE_DIR=tmp_path / "disk", **sets)
    (copied,) = cluster.calls("srun", "stage.sh")
    assert copied["words"][-1] == f"{tmp_path}/disk{tmp_path}/set", done.stderr
    (run,) = cluster.calls("srun", "run_and_time.sh")
    (mounts,) = [word for word in run["words"] if word.startswith("--container-mounts=")]
    assert f",{tmp_path}/disk{tmp_path}/set/train:" in mounts


def test_a_stage_dir_that_leads_back_to_the_data_is_refused(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    (data := tmp_path / "data").mkdir()
    (data / "one").touch()
    (tmp_path / "root").symlink_to("/")
    for folder in ("/", tmp_path / "root", data):
        done = cluster.job(STAGE_DIR=folder, DATADIR_PHASE2=data)
        assert_refused(done, "the target is the source, or is inside it. Set STAGE_DIR to")
        assert cluster.calls("srun", "stage.sh") == []
    assert (data / "one").exists()


def test_ssh_starts_torchrun_on_each_host(cluster: FakeCluster) -> None:
    done = cluster.start("run_multinode.sh", "--max_steps", "5", HOSTS="n1,n2", BATCHSIZE=4)
    calls = cluster.calls("ssh", "run_and_time.sh")
    assert sorted(call["words"][2] for call in calls) == ["n1", "n2"], done.stderr
    for call in calls:
        assert call["words"][:2] == ["-o", "BatchMode=yes"]
        # How the remote shell parses the line, with printf instead of the program.
        line = call["words"][3].replace("exec env", "exec printf '%s\\n'")
        remote = subprocess.run(
            ["bash", "-c", line], capture_output=True, text=True, check=True
        ).stdout.splitlines()
        assert f"NODE_RANK={call['words'][2][1:] == '2':d}" in remote
        assert {
            "MASTER_ADDR=n1",
            "MASTER_PORT=29500",
            "BATCHSIZE=4",
            f"LOGDIR={cluster.logs}",
        } <= set(remote)
        assert remote[-3:] == [str(cluster.launch / "run_and_time.sh"), "--max_steps", "5"]


@pytest.mark.parametrize(
    ("word", "status", "error"), [("true", 2, "on n2;"), ("run_and_time", 3, "lost the connection")]
)
def test_lost_ssh_connections_are_reported(
    cluster: FakeCluster, word: str, status: int, error: str
) -> None:
    ssh = cluster.programs / "ssh"
    ssh.write_text(
        f'#!/bin/sh\necho "$*" >>{cluster.notes}\ncase $* in *n2*{word}*) exit 255 ;; esac\n'
    )
    done = cluster.start("run_multinode.sh", HOSTS="n1,n2")
    assert (done.returncode, "run_and_time" in cluster.notes.read_text()) == (status, status == 3)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ssh ")
    assert error in line


@pytest.mark.parametrize("engine", ["ssh", "mpirun"])
def test_settings_are_checked_before_anything_starts_on_the_hosts(
    checking_cluster: FakeCluster, engine: str
) -> None:
    cluster = checking_cluster
    command = ["run_multinode.sh"]
    if engine == "mpirun":
        command.append("--mpirun")
    for flags, exports, name in (
        ((), {"BATCHSIZE": 15}, "BATCHSIZE"),
        (("--max_steps", "x"), {}, "--max-steps"),
    ):
        assert_refused(cluster.start(*command, *flags, **exports), name)
    assert not cluster.notes.exists(), "something was started"
    done = cluster.start(*command, GRADIENT_CLIPING="x")
    assert MISSPELT in done.stderr.splitlines()
    assert cluster.calls(engine, "run_and_time.sh")
