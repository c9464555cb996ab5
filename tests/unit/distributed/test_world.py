"""Which rank a process is, for the environments that launchers make."""

import multiprocessing
import resource

import pytest

from mlbert.distributed.open_files import raise_open_files_limit
from mlbert.distributed.place import expand_hostlist, expand_tasks_per_node
from mlbert.distributed.rendezvous import default_join_seconds
from mlbert.distributed.world import World
from programs import words_as_dict
from user_errors import user_error

SRUN = words_as_dict(
    "SLURM_JOB_ID=1234 SLURM_STEP_ID=2 SLURM_STEP_NUM_TASKS=7 SLURM_STEP_NUM_NODES=2 "
    "SLURM_STEP_TASKS_PER_NODE=4,3"
    " SLURM_STEP_NODELIST=localhost,no-such-host-here SLURM_NTASKS=7 SLURM_NODEID=1 "
    "SLURM_PROCID=5 SLURM_LOCALID=1"
)
TWO_TASKS = words_as_dict("SLURM_STEP_NUM_TASKS=2 SLURM_STEP_TASKS_PER_NODE=1(x2) SLURM_PROCID=1")
TORCHRUN = words_as_dict(
    "TORCHELASTIC_RUN_ID=none RANK=3 WORLD_SIZE=4 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 "
    "MASTER_ADDR=head MASTER_PORT=1234"
)
OPENMPI = words_as_dict(
    "OMPI_COMM_WORLD_RANK=2 OMPI_COMM_WORLD_SIZE=4 OMPI_COMM_WORLD_LOCAL_RANK=0 "
    "OMPI_COMM_WORLD_LOCAL_SIZE=2"
    " MASTER_ADDR=head"
)
VARIABLES = words_as_dict("RANK=1 WORLD_SIZE=2")
MPICH = words_as_dict("PMI_RANK=1 PMI_SIZE=2 MPI_LOCALRANKID=1 MPI_LOCALNRANKS=2")
IDENTITIES = {
    "nothing set": ({}, World(0, 0, 1, 1, "single")),
    "torchrun": (TORCHRUN, World(3, 1, 4, 2, "torchrun", "head", 1234)),
    "torchrun inside srun": (
        SRUN | TWO_TASKS | TORCHRUN,
        World(3, 1, 4, 2, "torchrun", "head", 1234),
    ),
    "plain variables on one machine": (
        VARIABLES,
        World(1, 1, 2, 2, "variables", "127.0.0.1", 29500),
    ),
    "Open MPI": (OPENMPI, World(2, 0, 4, 2, "mpirun", "head", 29500)),
    "mpirun inside Slurm": (SRUN | TWO_TASKS | OPENMPI, World(2, 0, 4, 2, "mpirun", "head", 29500)),
    "MPICH": (MPICH, World(1, 1, 2, 2, "mpirun")),
}


@pytest.mark.parametrize(("environ", "world"), IDENTITIES.values(), ids=IDENTITIES)
def test_identity(environ, world):
    assert World.identify(environ) == world


def test_a_torchrun_that_restarts_ranks_needs_a_store_for_each_round():
    restarts = {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "3"}
    World.identify({**restarts, "TORCHELASTIC_USE_AGENT_STORE": "False"})
    World.identify(
        {**TORCHRUN, "TORCHELASTIC_MAX_RESTARTS": "0", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    )
    with user_error("distributed.identity", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"):
        World.identify({**restarts, "TORCHELASTIC_USE_AGENT_STORE": "True"})


def test_srun_task_with_and_without_pmi():
    for world in (World.identify(SRUN), World.identify(SRUN | {"PMI_RANK": "5", "PMI_SIZE": "7"})):
        assert (world.rank, world.local_rank, world.world_size, world.local_world_size) == (
            5,
            1,
            7,
            3,
        )
        assert (world.launcher, world.master_addr) == ("slurm", "localhost")
    assert 15000 <= world.master_port < 32768
    assert World.identify(SRUN | {"SLURM_STEP_ID": "3"}).master_port != world.master_port


def test_address_of_the_first_rank_of_srun():
    environ = SRUN | {
        "SLURM_STEP_NODELIST": "no-such-host-here[1-2]",
        "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7",
    }
    assert World.identify(environ).master_addr == "10.0.0.7"
    assert World.identify(environ | {"MASTER_ADDR": "head"}).master_addr == "head"
    environ = SRUN | {
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_TASKS_PER_NODE": "7",
        "SLURM_NODEID": "0",
    }
    world = World.identify(environ)
    assert (world.local_world_size, world.master_addr) == (7, "127.0.0.1"), "one machine"


@pytest.mark.parametrize(
    "environ",
    [
        {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NODELIST": "n[1-2]"},
        {
            "SLURM_JOB_ID": "7",
            "SLURM_NTASKS": "8",
            "SLURM_PROCID": "0",
            "SLURM_LOCALID": "0",
            "SLURM_NODEID": "0",
        },
        # salloc's interactive step, and srun --pty bash
        {
            "SLURM_STEP_ID": "4294967290",
            "SLURM_STEP_NUM_TASKS": "1",
            "SLURM_PROCID": "0",
            "SLURM_NTASKS": "8",
        },
    ],
)
def test_shell_of_an_allocation_is_a_single_process(environ):
    assert World.identify(environ).world_size == 1


@pytest.mark.parametrize(
    ("environ", "subject"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"LOCAL_RANK": "0"}, "RANK and WORLD_SIZE"),
        (VARIABLES | {"RANK": "two"}, "RANK"),
        (VARIABLES | {"RANK": "2"}, "process identity"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "process identity"),
        (
            VARIABLES | {"MASTER_ADDR": "head"},
            "process identity",
        ),  # several machines need a local rank
        ({key: value for key, value in OPENMPI.items() if key != "MASTER_ADDR"}, "MASTER_ADDR"),
        (TORCHRUN | {"LOCAL_RANK": "2"}, "process identity"),
        (TORCHRUN | {"LOCAL_WORLD_SIZE": "8"}, "process identity"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({key: value for key, value in SRUN.items() if key != "SLURM_PROCID"}, "SLURM_PROCID"),
        (SRUN | {"RANK": "0", "WORLD_SIZE": "1"}, "process identity"),
        (OPENMPI | {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}, "process identity"),
    ],
)
def test_partial_or_contradictory_identity_is_refused(environ, subject):
    with user_error("distributed.identity", subject):
        World.identify(environ)


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("a,b.domain", ["a", "b.domain"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[09-10]-ib", ["r1n09-ib", "r1n10-ib", "r2n09-ib", "r2n10-ib"]),
    ],
)
def test_hostlist(text, hosts):
    assert expand_hostlist(text) == hosts


@pytest.mark.parametrize("text", ["", "n[3-1]", "n[a-b]", "n[1-2"])
def test_invalid_hostlists_are_refused(text):
    with user_error("distributed.identity", "SLURM_JOB_NODELIST"):
        expand_hostlist(text)


def test_tasks_per_node():
    assert expand_tasks_per_node("4(x2),3") == [4, 4, 3]
    with user_error("distributed.identity", "SLURM_STEP_TASKS_PER_NODE"):
        expand_tasks_per_node("four")


def test_the_join_timeout_grows_with_the_ranks_and_a_short_one_does_not_shorten_collectives():
    assert [round(default_join_seconds(ranks)) for ranks in (2, 8, 1024, 2048, 4096)] == [
        120,
        121,
        240,
        360,
        600,
    ]
    world = World(0, 0, 2048, 8, "variables")
    assert world.collective_timeout.total_seconds() == 360
    world.rendezvous.set_join_timeout(5.0)
    assert (world.rendezvous.join_seconds, world.collective_timeout.total_seconds()) == (5, 120)
    world.rendezvous.set_join_timeout(900.0)
    assert world.collective_timeout.total_seconds() == 900
    world.rendezvous.set_join_timeout(None)
    assert world.rendezvous.join_seconds == 360


@pytest.mark.parametrize(
    ("hard", "ranks", "raised"),
    [
        pytest.param(4000, 8, 1024, id="enough already"),
        pytest.param(4000, 400, 2112, id="raised to twice the need"),
        pytest.param(1500, 400, 1500, id="raised to the hard limit"),
    ],
)
def test_limit_on_open_files_grows_with_the_ranks(hard, ranks, raised):
    """In another process, because a process cannot raise its hard limit again;
    tests/dist has one that is too low.
    """
    context = multiprocessing.get_context("fork")
    found = context.SimpleQueue()

    def work() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        raise_open_files_limit(ranks)
        found.put(resource.getrlimit(resource.RLIMIT_NOFILE))

    process = context.Process(target=work)
    process.start()
    process.join(60)
    assert process.exitcode == 0
    assert found.get() == (raised, hard)
