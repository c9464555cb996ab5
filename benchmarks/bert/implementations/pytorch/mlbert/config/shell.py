"""Settings read only by the launchers."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

from mlbert.config.section import Ranges, Section, setting
from mlbert.host.texts import is_count

_setting = functools.partial(setting, key="")  # neither a flag nor a YAML key


class LaunchConfig(Section):
    """Settings read only in the launchers' shell scripts.

    Never instantiated: only names and limits matter.
    """

    dgxsystem: str = _setting(
        "DGXSYSTEM", "System name: the config's file name without config_ and .sh."
    )
    dgxnnodes: int = _setting("DGXNNODES", "Number of nodes.", unit="nodes", ge=1, le=100000)
    dgxngpu: int = _setting(
        "DGXNGPU",
        "Ranks per node: one per accelerator, or one on a CPU.",
        unit="ranks",
        ge=1,
        le=1024,
    )
    walltime: str = _setting("WALLTIME", "Time limit of the job, as for sbatch -t.", unit="minutes")
    nexp: int = _setting("NEXP", "Runs per job.", unit="runs", ge=1, le=1000)
    config_file: Path = _setting("CONFIG_FILE", "The sourced config_*.sh, for error messages.")
    cont: str = _setting(
        "CONT",
        "Container image (a .sqsh or .sif, or an image of enroot or docker); "
        "not set: no container.",
    )
    cont_mounts: str = _setting(
        "CONT_MOUNTS",
        "Extra mounts, SRC:DST[:ro], comma-separated; repository, data, LOGDIR are always mounted.",
    )
    srun_args: str = _setting(
        "SRUN_ARGS", "Arguments for every srun of the job, such as --gres=gpu:8."
    )
    slurm_mpi_type: str = _setting("SLURM_MPI_TYPE", "srun's --mpi; not set: pmi2 if Slurm has it.")
    slurm_cpus: int = _setting(
        "SLURM_CPUS",
        "CPUs per node, shared by its ranks; not set: all of the job's.",
        **Ranges.CPUS,
    )
    dgxht: int = _setting("DGXHT", "Hardware threads per core that a rank is bound to.", ge=1, le=8)
    bind_cpus: bool = _setting(
        "BIND_CPUS", "Bind each rank to the cores and memory closest to its GPU."
    )
    clear_caches: bool = _setting("CLEAR_CACHES", "Drop the page cache before each run.")
    nccl_test: bool = _setting(
        "NCCL_TEST", "Test the network before the first run and report the slowest node."
    )
    nccl_nvls_enable: int = _setting(
        "NCCL_NVLS_ENABLE",
        "Passed to NCCL: reduce in NVLink switches; not set: if possible.",
        ge=0,
        le=2,
    )
    nccl_graph_register: int = _setting(
        "NCCL_GRAPH_REGISTER",
        "Passed to NCCL: register buffers of reductions captured in CUDA graphs.",
        ge=0,
        le=1,
    )
    nccl_local_register: int = _setting(
        "NCCL_LOCAL_REGISTER", "Passed to NCCL: let PyTorch register buffers.", ge=0, le=1
    )
    check_compliance: bool = _setting("CHECK_COMPLIANCE", "Check each run's log inside the job.")
    collect_results: bool = _setting(
        "COLLECT_RESULTS", "Copy the logs to the repository's results/<platform>/bert."
    )
    timed: bool = _setting(
        "TIMED",
        "Runs count as results: an interrupted run is recorded as aborted and never resumed.",
    )
    max_restarts: int = _setting(
        "MAX_RESTARTS",
        "How often a job restarts a run after losing a rank; timed runs are never restarted.",
        ge=0,
        le=1000,
    )
    spares: int = _setting(
        "SPARES",
        "Nodes of a job beyond DGXNNODES, which replace lost ones.",
        unit="nodes",
        ge=0,
        le=1000,
    )
    stage_dir: Path = _setting(
        "STAGE_DIR",
        "Folder on each node's disk to which run.sub copies the data before the first run.",
    )
    hosts: str = _setting(
        "HOSTS", "Hosts for run_multinode.sh, comma-separated; the first one runs rank 0."
    )
    python: Path = _setting(
        "PYTHON",
        "Python to use; not set: the one in the repository's virtual environment or on PATH.",
    )
    master_addr: str = _setting("MASTER_ADDR", "Host of rank 0.")
    master_port: int = _setting("MASTER_PORT", "Port of rank 0.", ge=1, le=65535)


def planned_world_size(environ: Mapping[str, str]) -> int | None:
    """Return DGXNNODES x DGXNGPU of a sourced config, or None."""
    counts = [environ.get(name, "") for name in ("DGXNNODES", "DGXNGPU")]
    if not all(is_count(count) and int(count) > 0 for count in counts):
        return None
    return int(counts[0]) * int(counts[1])
