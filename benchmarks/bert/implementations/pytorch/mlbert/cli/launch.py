"""``mlbert launch``: submit chains of jobs, start local ranks,
and run what launchers need around a run.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from mlbert.distributed.address import HeadAddress
from mlbert.distributed.place import DEFAULT_PORT, HIGHEST_PORT, LOOPBACK
from mlbert.host.console import standard_output
from mlbert.host.environment import default_variable, environment
from mlbert.host.errors import UserError, nearest
from mlbert.host.exit_statuses import BY_SIGNAL, LOST_RANK
from mlbert.host.json_files import shown
from mlbert.host.option_checks import check_at_most_one
from mlbert.host.provenance import tree_root
from mlbert.host.texts import is_count
from mlbert.mlperf.mllog import close_interrupted
from mlbert.programs.host_list import MOST_SLOTS, HostList, parse_hosts, read_hostfile
from mlbert.programs.on_host import run_order
from mlbert.programs.over_ssh import HostRun, carried

_MOST_MIB = 4096  # message size
_OWN_ADDRESS_SECONDS = 40.0  # name servers may repeat for 30 s that a new name does not exist
_FIRST_NODE_SECONDS = 810.0  # nodes may start one after another; torchrun itself waits 900 s
_NOTICE_SECONDS = 20.0
_ONE_NODE = ("1", "1:1")  # torchrun's --nnodes

app = typer.Typer(
    help="Submit job chains, start ranks, and run launcher helpers.",
    add_completion=False,
    rich_markup_mode=None,
)
# Commands of mlbert that train on several ranks.
_COMMANDS = ("pretrain", "train")
# Of a command whose last argument is another program's command line.
PASSED_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
Script = Annotated[
    list[str],
    typer.Argument(
        metavar="SCRIPT",
        help="A Python file, -m and a module, or pretrain or train, with its arguments.",
    ),
]
_LOCAL_OPTIONS = ("--nproc", "--world-size", "--node-rank", "--master-addr", "--master-port")
_HOSTS_OPTIONS = ("--hosts", "--hostfile", "--nproc", "--master-addr", "--master-port", "--export")


@app.command("chain", context_settings={"ignore_unknown_options": True})
def chain(
    num_jobs: Annotated[int, typer.Argument(metavar="N", help="Number of jobs.", min=1)],
    sbatch_words: Annotated[
        list[str],
        typer.Argument(
            metavar="SBATCH",
            help="Arguments of sbatch, such as -N 2 -t 60 run.sub",
            show_default=False,
        ),
    ],
) -> None:
    """Submit N jobs, each resuming where the previous one stopped; print their numbers.

    For pre-training that exceeds a job's time limit: source a config with SAVE_CHECKPOINT_STEPS,
    then mlbert launch chain 5 -N ${DGXNNODES} -t ${WALLTIME} run.sub

    \b
    Examples:
      source config_X.sh && mlbert launch chain 5 -N 8 -t 240 run.sub
    """
    exports = environment()
    if not exports.get("CONFIG_FILE"):
        reason = "is not set"
        raise UserError(
            "config.missing",
            "CONFIG_FILE",
            reason,
            "Source a config first: source config_<system>.sh",
        )
    if exports.get("TIMED", "0").lower() in ("1", "yes", "true", "on"):
        raise UserError(
            "config.conflict",
            "TIMED",
            "is set, and a timed run cannot be resumed",
            "Unset it for a chain",
        )
    number = ""
    for _ in range(num_jobs):
        dependency = [f"--dependency=afterany:{number}"] if number else []
        words = ["sbatch", "--parsable", *dependency, *sbatch_words]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, check=False, env={**exports, "RESUME": "1"}
            )
        except FileNotFoundError:
            reason = "is not installed here"
            raise UserError(
                "program.missing", "sbatch", reason, "Submit from a login node of the cluster"
            ) from None
        if done.returncode:
            remedy = "See its output above"
            raise UserError(
                "program.failed", "sbatch", " ".join(done.stderr.split()) or "failed", remedy
            )
        number = done.stdout.strip().split(";")[0]
        print(number, flush=True)


@app.command("local", context_settings=PASSED_ON)
def local(
    script: Script,
    nproc: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--nproc",
            envvar="LOCAL_WORLD_SIZE",
            help="Ranks on this node; default: one per GPU.",
            min=1,
            max=MOST_SLOTS,
        ),
    ] = None,
    world_size: Annotated[
        int | None, typer.Option("--world-size", envvar="WORLD_SIZE", help="Ranks on all nodes.")
    ] = None,
    node_rank: Annotated[
        int, typer.Option("--node-rank", envvar="NODE_RANK", help="Index of this node.")
    ] = 0,
    master_addr: Annotated[
        str, typer.Option("--master-addr", envvar="MASTER_ADDR", help="Address of node 0.")
    ] = "127.0.0.1",
    master_port: Annotated[
        int | None,
        typer.Option(
            "--master-port",
            envvar="MASTER_PORT",
            help="Port on node 0.",
            min=1,
            max=HIGHEST_PORT,
        ),
    ] = None,
) -> None:
    """Start this node's ranks with torchrun, using the flags
    and variables of MosaicML's composer launcher: mlbert launch local -n 8 pretrain TEXT ...

    With several nodes, run it on each with the same world_size, master_addr and master_port.

    \b
    Examples:
      mlbert launch local -n 8 pretrain texts/ --tokens 1e9 --out my-model
      mlbert launch local -n 8 main.py yamls/main/mosaic-bert-base-uncased.yaml
    """
    _check_script(script, "local", _LOCAL_OPTIONS)
    if nproc is None:
        import torch

        nproc = max(1, torch.cuda.device_count())
    command = local_command(nproc, world_size, node_rank, master_addr, master_port)
    # torchrun sets these for each rank.
    names = (
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
        "RANK",
        "LOCAL_RANK",
        "MASTER_ADDR",
        "MASTER_PORT",
    )
    exports = {name: value for name, value in environment().items() if name not in names}
    exports.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // nproc)))
    os.execvpe(sys.executable, [*command, *_program_words(script)], exports)


def _check_script(script: list[str], command: str, options: Sequence[str]) -> None:
    """Raise UserError if a program begins with dashes: it is an option that is not known."""
    if script[0].startswith("--"):
        name = script[0].partition("=")[0]
        known = nearest(name, options)
        remedy = f"Did you mean {known}?" if known else f"See mlbert launch {command} --help"
        raise UserError("config.unknown-name", name, "is an unknown option", remedy)


def _program_words(script: list[str]) -> list[str]:
    """Return torchrun's arguments for a program: a file, a module after -m, or a command."""
    name = script[0]
    if name == "-m":
        return ["-m", "--", *script[1:]]
    if name in _COMMANDS and not Path(name).is_file():
        return ["-m", "--", "mlbert", *script]
    return ["--", *script]


def local_command(
    nproc: int, world_size: int | None, node_rank: int, master_addr: str, master_port: int | None
) -> list[str]:
    """Return the torchrun command up to the script.

    Raises UserError if the numbers are inconsistent.
    """
    world_size = nproc if world_size is None else world_size
    nodes, rest = divmod(world_size, nproc)
    if rest or not 0 <= node_rank < nodes:
        reason = f"with {nproc} ranks per node has no node {node_rank}"
        remedy = "Give a multiple of -n, and a --node-rank below the number of nodes"
        raise UserError("config.conflict", f"--world-size {world_size}", reason, remedy)
    command = [sys.executable, "-m", "mlbert", "launch", "ranks", "--nproc-per-node", str(nproc)]
    if nodes == 1:
        if master_port:
            return [*command, "--master-port", str(master_port)]
        return [*command, "--standalone"]
    if master_port is None:
        reason = "is not set, and there are several nodes"
        raise UserError(
            "config.missing", "--master-port", reason, "Give the same one on every node"
        )
    return [
        *command,
        "--nnodes",
        str(nodes),
        "--node-rank",
        str(node_rank),
        "--master-addr",
        master_addr,
        "--master-port",
        str(master_port),
    ]


@app.command("hosts", context_settings=PASSED_ON)
def hosts(
    script: Script,
    names: Annotated[
        str | None, typer.Option("--hosts", metavar="A,B", help="Hosts; rank 0 runs on the first.")
    ] = None,
    hostfile: Annotated[
        Path | None, typer.Option(help="File with a host on each line: node1 slots=8")
    ] = None,
    nproc: Annotated[
        int | None,
        typer.Option(
            "-n", "--nproc", help="Ranks on each host; default: its slots.", min=1, max=MOST_SLOTS
        ),
    ] = None,
    master_addr: Annotated[
        str | None, typer.Option("--master-addr", help="Address of the first host; default: name.")
    ] = None,
    master_port: Annotated[
        int,
        typer.Option("--master-port", help="Port on the first host.", min=1, max=HIGHEST_PORT),
    ] = DEFAULT_PORT,
    exports: Annotated[
        list[str] | None,
        typer.Option("--export", metavar="NAME", help="Variable to pass to the hosts; repeatable."),
    ] = None,
) -> int:
    """Start ranks on several hosts over ssh, without a scheduler.

    Each host runs mlbert launch local in this folder with this Python, so both must have the same
    path everywhere. The variables PATH, PYTHONPATH, LD_LIBRARY_PATH, CPU_THREADS, CUDA_*, GLOO_*,
    HF_*, NCCL_*, OMP_* and TORCH_* are passed on. If a host fails, the
    others are ended too, and this command exits with its status.

    \b
    Examples:
      mlbert launch hosts --hosts node1,node2 -n 8 pretrain data --tokens 1e9
      mlbert launch hosts --hostfile hosts.txt main.py job.yaml
    """
    _check_script(script, "hosts", _HOSTS_OPTIONS)
    chosen = _chosen_hosts(names, hostfile)
    ranks_of_host = nproc or chosen.slots
    if ranks_of_host is None:
        remedy = "Give the ranks on each host: -n 8"
        raise UserError("config.missing", "--nproc", "is not given, nor are slots", remedy)
    if chosen.slots is not None and ranks_of_host > chosen.slots:
        reason = f"is more than the {chosen.slots} slots of a host in {hostfile}"
        raise UserError("config.conflict", f"--nproc {nproc}", reason, "Lower it")
    num_hosts = len(chosen.names)
    address = master_addr or chosen.first_address
    options = ["-n", ranks_of_host, "--world-size", num_hosts * ranks_of_host]
    options += ["--master-addr", address, "--master-port", master_port]
    start = [sys.executable, "-m", "mlbert", "launch", "local", *map(str, options)]
    words = [[*start, "--node-rank", str(number), *script] for number in range(num_hosts)]
    return HostRun(chosen.names, words, carried(environment(), exports or [])).run()


def _chosen_hosts(names: str | None, hostfile: Path | None) -> HostList:
    check_at_most_one({"--hosts": names, "--hostfile": hostfile})
    if names is not None:
        return parse_hosts(names)
    if hostfile is not None:
        return read_hostfile(hostfile)
    remedy = "Name them: --hosts node1,node2, or --hostfile FILE"
    raise UserError("config.missing", "--hosts", "is not given", remedy)


@app.command("on-host", hidden=True)
def on_host() -> int:
    """Run the command that `mlbert launch hosts` sends on standard input."""
    return run_order()


@app.command(
    "ranks",
    hidden=True,
    context_settings=PASSED_ON,
)
def ranks(words: Annotated[list[str], typer.Argument(help="Arguments of torchrun.")]) -> int:
    """Run torchrun, silence its report, and exit with the status of the rank that failed first."""
    # Node 0 has the store and may end first: the other agents would print a stack.
    # The ranks show their warnings.
    with default_variable("TORCH_CPP_LOG_LEVEL", "ERROR"):
        from torch.distributed.elastic.multiprocessing.api import SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.elastic.rendezvous import RendezvousError
        from torch.distributed.run import main, parse_args

    options = parse_args(words)
    is_static = options.rdzv_backend == "static" and not options.standalone
    if is_static and options.nnodes not in _ONE_NODE:
        port = options.master_port or DEFAULT_PORT
        _meet_first_node(options.node_rank, options.master_addr, port)
    if "--standalone" in words:
        # Else the ranks look for each other at this host's full name, which may not resolve.
        words = ["--local-addr", LOOPBACK, *words]
    logging.disable()  # torchrun's report; the failed rank prints its own error
    try:
        main(words)
    except ChildFailedError as error:
        status = error.get_first_failure()[1].exitcode
        return status if status > 0 else LOST_RANK
    except SignalException as signalled:
        return BY_SIGNAL + signalled.sigval
    except (RendezvousError, RuntimeError, OSError) as error:
        reason = f"the nodes did not connect: {' '.join(str(error).split())}"
        remedy = (
            "Set MASTER_ADDR and MASTER_PORT to a free port on the first node "
            "that all nodes can reach"
        )
        raise UserError("program.failed", "torchrun", reason, remedy) from error
    return 0


def _meet_first_node(node_rank: int, address: str, port: int) -> None:
    """Wait until node 0 answers; on node 0, check that the others can find it.

    Raises:
        UserError: it does not answer, or they cannot.
    """
    head = HeadAddress(address, port)
    if node_rank == 0:
        head.listen_and_reach(_OWN_ADDRESS_SECONDS)
        return
    if head.reach(_NOTICE_SECONDS) is not None:
        return
    print(
        f"mlbert: node {node_rank} waits for node 0: MASTER_ADDR={address}: {head.obstacle}",
        file=sys.stderr,
        flush=True,
    )
    if head.reach(_FIRST_NODE_SECONDS - _NOTICE_SECONDS) is None:
        remedy = (
            "Check that node 0 runs, and that MASTER_ADDR and MASTER_PORT are its address "
            "and a free port there"
        )
        raise UserError("distributed.join", f"MASTER_ADDR={address}", head.obstacle, remedy)


@app.command("abort-log")
def abort_log(
    log: Annotated[Path, typer.Argument(help="result_<i>.txt of an interrupted run.")],
    reason: Annotated[str, typer.Option(help="Reason to log.")],
) -> None:
    """Close an interrupted run's log with run_stop, status aborted.

    A closed log is left unchanged.

    \b
    Examples:
      mlbert launch abort-log runs/mine/result_0.txt --reason NodeLost
    """
    if close_interrupted(log, tree_root(), reason):
        print(f"{log}: closed as aborted ({reason})")


@app.command("test-network")
def network_command(
    sizes: Annotated[str, typer.Option(help="Message sizes, MiB.")] = "1,16,64",
) -> None:
    """Measure all-reduce bandwidth, in total and per node, and name the slowest node.

    Run it on every rank.

    \b
    Examples:
      mlbert launch test-network --sizes 1,64
    """
    from mlbert.distributed.world import World
    from mlbert.programs.bench.network import measure

    sizes_mib = [
        int(size) if is_count(size.strip()) else 0 for size in sizes[:_MOST_MIB].split(",")
    ]
    if not all(1 <= size <= _MOST_MIB for size in sizes_mib):
        reason = f"{shown(sizes)} is not a list of whole numbers from 1 to {_MOST_MIB}"
        raise UserError("config.value", "--sizes", reason, "Give for example 1,16,64")
    world = World.identify()
    world.start()
    report = measure(world, sizes_mib)
    if world.rank == 0:
        for line in report.lines():
            standard_output().print(line, markup=False, highlight=False, soft_wrap=True)
    world.stop()
