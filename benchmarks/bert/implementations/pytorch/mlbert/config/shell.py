"""Settings read only by the launchers."""

from __future__ import annotations

from pathlib import Path

from mlbert.config.section import MOST_CPUS, Section, setting


class LaunchConfig(Section):
    """Settings read only in the launchers' shell scripts. Never instantiated: only names and limits matter."""

    dgxsystem: str = setting("DGXSYSTEM", "System name: the config's file name without config_ and .sh.", key="")
    dgxnnodes: int = setting("DGXNNODES", "Number of nodes.", unit="nodes", ge=1, le=100000, key="")
    dgxngpu: int = setting(
        "DGXNGPU", "Ranks per node: one per accelerator, or one on a CPU.", unit="ranks", ge=1, le=1024, key=""
    )
    walltime: str = setting("WALLTIME", "Time limit of the job, as for sbatch -t.", unit="minutes", key="")
    nexp: int = setting("NEXP", "Runs per job.", unit="runs", ge=1, le=1000, key="")
    config_file: Path = setting("CONFIG_FILE", "The sourced config_*.sh, for error messages.", key="")
    cont: str = setting(
        "CONT", "Container image (a .sqsh, or an image of enroot or docker); not set: no container.", key=""
    )
    cont_mounts: str = setting(
        "CONT_MOUNTS", "Extra mounts, SRC:DST[:ro], comma-separated; tree, data and LOGDIR are always mounted.", key=""
    )
    srun_args: str = setting("SRUN_ARGS", "Arguments for every srun of the job, such as --gres=gpu:8.", key="")
    slurm_mpi_type: str = setting("SLURM_MPI_TYPE", "srun's --mpi; not set: pmi2 if Slurm has it.", key="")
    slurm_cpus: int = setting(
        "SLURM_CPUS", "CPUs per node, shared by its ranks; not set: all of the job's.", ge=1, le=MOST_CPUS, key=""
    )
    dgxht: int = setting("DGXHT", "Hardware threads per core that a rank is bound to.", ge=1, le=8, key="")
    bind_cpus: bool = setting("BIND_CPUS", "Bind each rank to the cores and memory closest to its GPU.", key="")
    clear_caches: bool = setting("CLEAR_CACHES", "Drop the page cache before each run.", key="")
    nccl_test: bool = setting("NCCL_TEST", "Test the network before the first run and report the slowest node.", key="")
    nccl_nvls_enable: int = setting(
        "NCCL_NVLS_ENABLE", "Passed to NCCL: reduce in NVLink switches; not set: if possible.", ge=0, le=2, key=""
    )
    nccl_graph_register: int = setting(
        "NCCL_GRAPH_REGISTER",
        "Passed to NCCL: register buffers of reductions captured in CUDA graphs.",
        ge=0,
        le=1,
        key="",
    )
    nccl_local_register: int = setting(
        "NCCL_LOCAL_REGISTER", "Passed to NCCL: let PyTorch register buffers.", ge=0, le=1, key=""
    )
    check_compliance: bool = setting("CHECK_COMPLIANCE", "Check each run's log inside the job.", key="")
    collect_results: bool = setting("COLLECT_RESULTS", "Copy the logs to the tree's results/<platform>/bert.", key="")
    timed: bool = setting(
        "TIMED", "Runs count as results: an interrupted run is recorded as aborted and never resumed.", key=""
    )
    max_restarts: int = setting(
        "MAX_RESTARTS",
        "How often a job restarts a run after losing a rank; timed runs are never restarted.",
        ge=0,
        le=1000,
        key="",
    )
    spares: int = setting(
        "SPARES", "Nodes of a job beyond DGXNNODES, which replace lost ones.", unit="nodes", ge=0, le=1000, key=""
    )
    stage_dir: Path = setting(
        "STAGE_DIR", "Folder on each node's disk to which run.sub copies the data before the first run.", key=""
    )
    hosts: str = setting("HOSTS", "Hosts for run_multinode.sh, comma-separated; the first one runs rank 0.", key="")
    python: Path = setting(
        "PYTHON", "Python to use; not set: the one in the tree's virtual environment or on PATH.", key=""
    )
    master_addr: str = setting("MASTER_ADDR", "Host of rank 0.", key="")
    master_port: int = setting("MASTER_PORT", "Port of rank 0.", ge=1, le=65535, key="")
