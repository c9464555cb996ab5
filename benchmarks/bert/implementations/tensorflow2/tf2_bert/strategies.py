"""Configure devices before TensorFlow initializes them, and create the `tf.distribute` strategy."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeAlias

import tensorflow as tf

from mlbert.config.tensorflow import TensorFlowConfig
from mlbert.host.environment import environment
from mlbert.host.errors import UserError
from tf2_bert.messages import plain

Strategy: TypeAlias = tf.distribute.Strategy
Resolver: TypeAlias = tf.distribute.cluster_resolver.ClusterResolver

# Strategy -> supported all-reduce algorithms.
_ALL_REDUCE = {"mirrored": ("nccl", "hierarchical_copy"), "multi_worker_mirrored": ("nccl", "ring")}
MAX_VIRTUAL_CPUS = 64  # each has threads and a copy of the weights


def prepare_devices(config: TensorFlowConfig, cpu_threads: int | None, num_gpus: int) -> None:
    """Set the threads and devices of this process:
    the first `num_gpus` GPUs, or as many virtual CPUs without a GPU.

    Call it before any other use of TensorFlow.

    Args:
        config: TensorFlow settings.
        cpu_threads: threads of this process; None keeps TensorFlow's default.
        num_gpus: number of GPUs or virtual CPUs; 0 selects the CPU.

    Raises:
        UserError: there are fewer GPUs, or too many virtual CPUs are requested.
        RuntimeError: TensorFlow already initialized its devices with other settings.
    """
    if num_gpus < 0:
        raise UserError(
            "config.range", "num_gpus", f"is {num_gpus}", "Set the number of GPUs, or 0 for the CPU"
        )
    if cpu_threads is not None:
        tf.config.threading.set_intra_op_parallelism_threads(cpu_threads)
        tf.config.threading.set_inter_op_parallelism_threads(cpu_threads)
    if config.distribution_strategy == "tpu":
        return
    gpus = tf.config.list_physical_devices("GPU")
    if gpus:
        _check_number(num_gpus, len(gpus), "GPUs")
        tf.config.set_visible_devices(gpus[:num_gpus], "GPU")
    elif num_gpus > 1 and config.distribution_strategy == "mirrored":
        if num_gpus > MAX_VIRTUAL_CPUS:
            reason = (
                f"is {num_gpus}, but without a GPU the CPU is split into at most "
                f"{MAX_VIRTUAL_CPUS} devices"
            )
            raise UserError("config.range", "num_gpus", reason, f"Set at most {MAX_VIRTUAL_CPUS}")
        set_virtual_cpus(num_gpus)


def set_virtual_cpus(count: int) -> None:
    """Split the CPU into ``count`` devices, which all share the same cores.

    Raises:
        RuntimeError: TensorFlow already initialized its devices with another number.
    """
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * count
    )


def make_strategy(
    config: TensorFlowConfig, num_gpus: int, worker_hosts: Sequence[str] = (), task_index: int = -1
) -> tuple[Strategy, list[str]]:
    """Create the strategy that DISTRIBUTION_STRATEGY names.

    Args:
        config: TensorFlow settings.
        num_gpus: devices of this process; 0 selects the CPU.
        worker_hosts: host:port of all processes of multi_worker_mirrored;
            if empty, TF_CONFIG or Slurm provides them.
        task_index: index of this process in ``worker_hosts``.

    Returns:
        The strategy, and notes for the user on settings that could not be followed.

    Raises:
        UserError: devices, workers or a TPU are not available, or settings conflict.
    """
    name = config.distribution_strategy
    algorithm = config.all_reduce_alg
    if algorithm is not None and algorithm not in (known := _ALL_REDUCE.get(name, ())):
        reason = f"{algorithm} is not supported with DISTRIBUTION_STRATEGY={name}"
        raise UserError(
            "config.choice",
            "ALL_REDUCE_ALG",
            reason,
            "Use a supported one" if known else "Leave it out",
            known,
        )
    if name in ("off", "one_device") and num_gpus > 1:
        reason = f"is {num_gpus}, but DISTRIBUTION_STRATEGY is {name}"
        raise UserError("config.conflict", "num_gpus", reason, "Set 1, or use mirrored")
    if name == "parameter_server":
        reason = (
            "parameter_server updates weights asynchronously, "
            "so no step has the batch that the benchmark counts"
        )
        raise UserError(
            "config.conflict",
            "DISTRIBUTION_STRATEGY",
            reason,
            "Use mirrored or multi_worker_mirrored",
        )
    if name == "tpu":
        return _tpu(config.tpu), []
    notes = []
    if algorithm == "nccl" and not _gpus_in_use(num_gpus):
        notes.append(
            "ALL_REDUCE_ALG: nccl needs GPUs, but there are none; the default algorithm is used."
        )
        algorithm = None
    if name == "multi_worker_mirrored":
        if num_gpus > 1 and not _gpus_in_use(num_gpus):
            notes.append(
                f"num_gpus: is {num_gpus}, but there is no GPU; "
                "this process trains on its CPU as one device."
            )
        return _multi_worker(
            algorithm, num_gpus, _cluster(worker_hosts, task_index, num_gpus)
        ), notes
    if name == "off":
        return tf.distribute.get_strategy(), notes
    devices = _devices(num_gpus)
    if name == "one_device":
        return tf.distribute.OneDeviceStrategy(devices[0]), notes
    return tf.distribute.MirroredStrategy(
        devices, cross_device_ops=_cross_device_ops(algorithm)
    ), notes


def _check_number(requested: int, available: int, kind: str) -> None:
    if requested > available:
        reason = f"is {requested}, but this machine has {available} {kind}"
        raise UserError("device.unavailable", "num_gpus", reason, f"Set at most {available}")


def _gpus_in_use(num_gpus: int) -> bool:
    return num_gpus > 0 and bool(tf.config.list_physical_devices("GPU"))


def _devices(num_gpus: int) -> list[str]:
    """Return the names of the first GPUs, or of virtual CPUs if there is no GPU."""
    kind = "GPU" if _gpus_in_use(num_gpus) else "CPU"
    available = [device.name for device in tf.config.list_logical_devices(kind)]
    _check_number(num_gpus, len(available), "GPUs" if kind == "GPU" else "CPU devices and no GPU")
    return available[: max(num_gpus, 1)]


def _cross_device_ops(algorithm: str | None) -> tf.distribute.CrossDeviceOps | None:
    if algorithm == "nccl":
        return tf.distribute.NcclAllReduce()
    return tf.distribute.HierarchicalCopyAllReduce() if algorithm == "hierarchical_copy" else None


def _multi_worker(algorithm: str | None, num_gpus: int, cluster: Resolver) -> Strategy:
    kinds = tf.distribute.experimental.CommunicationImplementation
    kind = kinds.NCCL if algorithm == "nccl" else kinds.AUTO
    if algorithm == "ring" or not _gpus_in_use(num_gpus):
        kind = kinds.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=kind)
    try:
        return tf.distribute.MultiWorkerMirroredStrategy(cluster, options)
    except tf.errors.OpError as error:
        spec = cluster.cluster_spec().as_dict().get("worker", [])
        reason = f"cannot start task {cluster.task_id} of {', '.join(spec)} ({plain(error)})"
        remedy = "Give host:port of each worker; this worker's port must be free"
        raise UserError("distributed.identity", "worker_hosts", reason, remedy) from None


def _cluster(worker_hosts: Sequence[str], task_index: int, num_gpus: int) -> Resolver:
    """Return the cluster from the arguments, else from TF_CONFIG, else from the Slurm step."""
    gpus = num_gpus if _gpus_in_use(num_gpus) else 0
    if worker_hosts:
        if not 0 <= task_index < len(worker_hosts):
            reason = f"is {task_index}, but there are {len(worker_hosts)} worker_hosts"
            raise UserError(
                "distributed.identity",
                "task_index",
                reason,
                "Give each process a different index, from 0",
            )
        spec = tf.train.ClusterSpec({"worker": list(worker_hosts)})
        return _simple(spec, task_index, gpus)
    known = environment()
    if known.get("TF_CONFIG"):
        try:
            json.loads(known["TF_CONFIG"])["cluster"]["worker"]
        except (ValueError, KeyError, TypeError) as error:
            remedy = 'Give {"cluster": {"worker": [...]}, ...}'
            raise UserError(
                "distributed.identity", "TF_CONFIG", "names no workers", remedy
            ) from error
        return tf.distribute.cluster_resolver.TFConfigClusterResolver()
    tasks = int(known.get("SLURM_NTASKS", "1"))
    if tasks > 1:
        return _slurm(tasks, gpus)
    remedy = "Give --worker_hosts and --task_index, set TF_CONFIG, or start several tasks with srun"
    raise UserError(
        "distributed.identity",
        "DISTRIBUTION_STRATEGY",
        "multi_worker_mirrored has no workers",
        remedy,
    )


def _slurm(tasks: int, gpus: int) -> Resolver:
    try:
        # srun has already assigned the GPUs. One each here gives every task a port.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            gpus_per_node=tasks, gpus_per_task=1, auto_set_gpu=False
        )
        spec = resolver.cluster_spec()
    except (RuntimeError, ValueError) as error:
        reason = f"is {tasks}, but TensorFlow cannot read the step's nodes ({error})"
        remedy = "Start it with srun, or give --worker_hosts and --task_index"
        raise UserError("distributed.identity", "SLURM_NTASKS", reason, remedy) from error
    _, index = resolver.get_task_info()
    actual = environment().get("SLURMD_NODENAME")
    expected = spec.task_address("worker", index).rpartition(":")[0]
    if actual not in (
        None,
        expected,
    ):  # TensorFlow sorts nodes by name; Slurm puts node10 after node9
        reason = f"TensorFlow expects task {index} on {expected}, but it runs on {actual}"
        raise UserError(
            "distributed.identity",
            "SLURM_STEP_NODELIST",
            reason,
            "Give --worker_hosts and --task_index",
        )
    return _simple(spec, index, gpus)


def _simple(spec: tf.train.ClusterSpec, task_index: int, gpus: int) -> Resolver:
    return tf.distribute.cluster_resolver.SimpleClusterResolver(
        spec,
        task_type="worker",
        task_id=task_index,
        rpc_layer="grpc",
        num_accelerators={"GPU": gpus},
    )


def _tpu(address: str | None) -> Strategy:
    try:
        resolver = tf.distribute.cluster_resolver.TPUClusterResolver(address or "")
        tf.config.experimental_connect_to_cluster(resolver)
        tf.tpu.experimental.initialize_tpu_system(resolver)
        return tf.distribute.TPUStrategy(resolver)
    except (ValueError, RuntimeError, OSError, tf.errors.OpError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        remedy = "Give the name or address of a TPU that this machine can reach"
        reason = f"{address or 'the local TPU'} cannot be used ({lines[0]})"
        raise UserError("device.unavailable", "TPU", reason, remedy) from error
