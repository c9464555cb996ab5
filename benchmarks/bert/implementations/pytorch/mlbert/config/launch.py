"""Settings of the launchers."""

from __future__ import annotations

from pathlib import Path

from mlbert.config.section import MOST_CPUS, Section, setting


class LaunchConfig(Section):
    """What only the launchers read, in the shell. Never made: the names and limits are what counts."""

    dgxsystem: str = setting("DGXSYSTEM", "Name of the system: the config's file name without config_ and .sh.", key="")
    dgxnnodes: int = setting("DGXNNODES", "Nodes of the job.", unit="nodes", ge=1, le=100000, key="")
    dgxngpu: int = setting(
        "DGXNGPU", "Ranks on each node, one an accelerator (one in all on a CPU).", unit="ranks", ge=1, le=1024, key=""
    )
    walltime: str = setting("WALLTIME", "Time limit of the job, as sbatch -t takes it.", unit="minutes", key="")
    nexp: int = setting("NEXP", "Runs of one job.", unit="runs", ge=1, le=1000, key="")
    config_file: Path = setting("CONFIG_FILE", "The config_*.sh that was sourced, named in errors.", key="")
    cont: str = setting(
        "CONT", "Container image (a .sqsh or what enroot and docker take); not set: no container.", key=""
    )
    cont_mounts: str = setting(
        "CONT_MOUNTS", "Further mounts, SRC:DST[:ro] with commas; tree, data and LOGDIR are mounted anyway.", key=""
    )
    srun_args: str = setting("SRUN_ARGS", "Words for every srun of the job, such as --gres=gpu:8.", key="")
    slurm_mpi_type: str = setting("SLURM_MPI_TYPE", "srun's --mpi; not set: pmi2 where Slurm has it.", key="")
    slurm_cpus: int = setting(
        "SLURM_CPUS", "CPUs of a node that its ranks share; not set: all of the job's.", ge=1, le=MOST_CPUS, key=""
    )
    dgxht: int = setting("DGXHT", "Hardware threads of a core that a rank is bound to.", ge=1, le=8, key="")
    bind_cpus: bool = setting("BIND_CPUS", "Bind each rank to the cores and memory beside its GPU.", key="")
    clear_caches: bool = setting("CLEAR_CACHES", "Drop the page cache before each run.", key="")
    nccl_test: bool = setting(
        "NCCL_TEST", "Measure the network before the first run and name the slowest node.", key=""
    )
    nccl_nvls_enable: int = setting(
        "NCCL_NVLS_ENABLE", "For NCCL: sums in NVLink switches; not set: where it can.", ge=0, le=2, key=""
    )
    nccl_graph_register: int = setting(
        "NCCL_GRAPH_REGISTER", "For NCCL: registers the buffers of captured sums.", ge=0, le=1, key=""
    )
    nccl_local_register: int = setting(
        "NCCL_LOCAL_REGISTER", "For NCCL: lets PyTorch register buffers.", ge=0, le=1, key=""
    )
    check_compliance: bool = setting("CHECK_COMPLIANCE", "Check each run's log inside the job.", key="")
    collect_results: bool = setting("COLLECT_RESULTS", "Copy the logs to results/<platform>/bert of the tree.", key="")
    timed: bool = setting(
        "TIMED", "Runs count as results: an interrupted one is recorded as aborted, never continued.", key=""
    )
    max_restarts: int = setting(
        "MAX_RESTARTS",
        "Times that a job starts a run again after losing a rank; never a timed one.",
        ge=0,
        le=1000,
        key="",
    )
    hosts: str = setting("HOSTS", "Hosts of run_multinode.sh, with commas; the first one runs rank 0.", key="")
    python: Path = setting(
        "PYTHON", "Python that runs everything; not set: that of the tree's virtual environment or of PATH.", key=""
    )
    master_addr: str = setting("MASTER_ADDR", "Host of rank 0.", key="")
    master_port: int = setting("MASTER_PORT", "Port of rank 0.", ge=1, le=65535, key="")
