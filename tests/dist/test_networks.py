"""Ranks on machines with networks of their own: whose names resolve badly,
or that rank 0's address does not reach.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from harness import Rank, rank_environment, start_ranks
from mlbert.distributed import rendezvous
from mlbert.distributed.rank_table import RankSite, summary, table
from mlbert.distributed.world import World
from mlbert.host.command_line import exit_code

# Make a network of NODES machines, 10.9.0.1 and so on, and run a program on each, with its index as
# RANK. As on Debian, the name of each machine resolves to 127.0.1.1 on itself. With ONLY_IPV6, the
# network has no IPv4 address: fd00:9::1 and so on.
NETWORK = r"""
set -e
ip link set lo up
ip link add bridge0 type bridge
ip link set bridge0 up
for ((node = 0; node < NODES; node++)); do
    mkfifo "${FOLDER}/ready_${node}"
    NODE="${node}" unshare --net --mount --uts bash -c '
        set -e
        hostname "node${NODE}"
        ip link set lo up
        read -r _ <"${FOLDER}/ready_${NODE}"
        if [[ "${ONLY_IPV6:-}" ]]; then
            network=fd00:9::
            ip -6 address add "${network}$((NODE + 1))/64" dev eth0 nodad
        else
            network=10.9.0.
            ip address add "${network}$((NODE + 1))/24" dev eth0
        fi
        ip link set eth0 up
        echo "127.0.0.1 localhost" >"${FOLDER}/hosts_${NODE}"
        [[ "${ONLY_IPV6:-}" ]] || echo "127.0.1.1 node${NODE}" >>"${FOLDER}/hosts_${NODE}"
        for ((other = 0; other < NODES; other++)); do
            echo "${network}$((other + 1)) node${other}" >>"${FOLDER}/hosts_${NODE}"
        done
        mount --bind "${FOLDER}/hosts_${NODE}" /etc/hosts
        RANK="${NODE}" exec "$@" >"${FOLDER}/output_${NODE}.txt" 2>&1
    ' node "$@" &
    pids[node]=$!
done
for ((node = 0; node < NODES; node++)); do
    until [[ "$(readlink "/proc/${pids[node]}/ns/net")" != "$(readlink /proc/self/ns/net)" ]]; do
        sleep 0.05
    done
    ip link add "port${node}" type veth peer name eth0 netns "${pids[node]}"
    ip link set "port${node}" master bridge0 up
    echo ready >"${FOLDER}/ready_${node}"
done
for node in "${!pids[@]}"; do
    wait "${pids[node]}" && status=0 || status=$?
    echo "${status}" >"${FOLDER}/status_${node}"
done
"""
PROGRAM = """
import sys
from test_networks import meet
meet(sys.argv[1])
"""


def start_network(script: str, folder: Path, nodes: int, *words: str, **exports: str) -> None:
    command = ["unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork"]
    environment = {**os.environ, "FOLDER": str(folder), "NODES": str(nodes), **exports}
    subprocess.run(
        [*command, "--mount-proc", "--kill-child", "bash", "-c", script, "network", *words],
        env=environment,
        check=True,
        timeout=150,
        capture_output=True,
    )


@pytest.fixture(scope="module")
def _networks(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("networks")
    try:
        start_network(NETWORK, folder, 1, "true")
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {error}")


def meet(seconds: str) -> None:
    """Connect to the other ranks, which have this many seconds for each part of it,
    and add a number up.
    """
    rendezvous.JOIN_SECONDS = float(seconds)
    rendezvous.HEAD_SECONDS = 2.0
    rendezvous.GRACE_SECONDS = 3.0

    def work() -> int:
        world = World.identify()
        world.start()
        world.barrier()
        sites = world.sites()
        if world.rank == 0:
            print(summary(sites, f"{world.master_addr}:{world.master_port}"))
        world.stop()
        return 0

    raise SystemExit(exit_code(work))


def meet_on_nodes(folder: Path, seconds: int, **exports: str) -> tuple[list[int], list[str]]:
    """Return the exit codes of three ranks, each on its own node,
    and the lines they print but torch's warnings.
    """
    words = [sys.executable, "-c", PROGRAM, str(seconds)]
    exports["PYTHONPATH"] = (
        f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}:" + ":".join(sys.path)
    )
    sizes = {"WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    start_network(NETWORK, folder, 3, *words, **sizes, **exports)
    lines = [
        line
        for node in range(3)
        for line in (folder / f"output_{node}.txt").read_text().splitlines()
        if not line.startswith("[W")
    ]
    return [int((folder / f"status_{node}").read_text()) for node in range(3)], lines


@pytest.mark.usefixtures("_networks")
def test_a_name_that_resolves_to_the_machine_itself_does_not_matter(tmp_path: Path) -> None:
    """Not even on rank 0's machine, which then reaches itself at an address
    that the others cannot.
    """
    codes, (line,) = meet_on_nodes(tmp_path, 60, MASTER_ADDR="node0")
    assert codes == [0, 0, 0]
    assert line == (
        "ranks: 3 on 3 nodes, rank 0 at node0:29500; gloo: node0 10.9.0.1 (eth0), "
        "node1 10.9.0.2 (eth0), node2 10.9.0.3 (eth0); devices of a node: cpu"
    )


@pytest.mark.usefixtures("_networks")
@pytest.mark.parametrize("head", ["node0", "fd00:9::1"])
def test_a_network_without_ipv4(tmp_path: Path, head: str) -> None:
    codes, lines = meet_on_nodes(tmp_path, 60, MASTER_ADDR=head, ONLY_IPV6="1")
    assert codes == [0, 0, 0], lines
    assert lines == [
        f"ranks: 3 on 3 nodes, rank 0 at {head}:29500; gloo: node0 fd00:9::1 (eth0), "
        "node1 fd00:9::2 (eth0), node2 fd00:9::3 (eth0); devices of a node: cpu"
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("_networks")
def test_an_interface_that_does_not_reach_the_others_is_one_line(tmp_path: Path) -> None:
    codes, (line,) = meet_on_nodes(tmp_path, 20, MASTER_ADDR="10.9.0.1", GLOO_SOCKET_IFNAME="lo")
    assert codes == [2, 2, 2]
    assert "gloo bound to lo cannot connect them to each other. Export GLOO_SOCKET_IFNAME" in line


def meet_at(exports: dict[str, str], seconds: str) -> None:
    os.environ.update(exports)
    meet(seconds)


@pytest.mark.parametrize(
    ("exports", "words"),
    [
        (
            {"MASTER_ADDR": "no-such-host.invalid"},
            "MASTER_ADDR=no-such-host.invalid: does not resolve",
        ),
        ({"MASTER_ADDR": "a..b"}, "MASTER_ADDR=a..b: does not resolve"),
        ({"MASTER_ADDR": "192.0.2.77"}, "MASTER_ADDR=192.0.2.77: port "),
        ({"MASTER_PORT": "99999"}, "MASTER_PORT: '99999' is not a port"),
        ({"MASTER_PORT": "29x"}, "MASTER_PORT: '29x' is not a port"),
        ({"LOCAL_RANK": "", "MASTER_ADDR": "head"}, "the local rank is not set"),
    ],
    ids=["no host", "no name", "no machine", "no port", "no number", "no local rank"],
)
def test_an_address_at_which_rank_0_cannot_be_reached_is_one_line(
    tmp_path: Path, exports: dict[str, str], words: str
) -> None:
    ranks = start_ranks(meet_at, (exports, "4"), 3, tmp_path)
    outputs = [rank.communicate(60) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [2, 2, 2]
    (line,) = [line for output in outputs for line in output.splitlines()]
    assert words in line


def test_a_port_of_another_program_is_one_line(tmp_path: Path) -> None:
    with socket.create_server(("", 0)) as other_program:
        port = other_program.getsockname()[1]
        environment = rank_environment(0, 3, port)
        rank = Rank(meet, ("60",), environment, tmp_path / "output.txt")
        (line,) = rank.communicate(60).splitlines()
    assert rank.returncode == 2
    assert f"error: MASTER_PORT={port}: is taken by another program" in line


def test_a_rank_0_that_does_not_run_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        environment = rank_environment(1, 3, port)
        rank = Rank(meet, ("4",), environment, tmp_path / "output.txt")
        (line,) = rank.communicate(60).splitlines()
    assert rank.returncode == 2
    assert f"port {port} of 127.0.0.1 does not answer" in line


def test_the_line_of_many_ranks_names_a_node_with_other_devices() -> None:
    sites = [
        RankSite(f"n{node}", f"10.0.0.{node}", "ib0", f"cuda:{gpu} NVIDIA H200 id{node}{gpu}")
        for node in range(9)
        for gpu in range(2 if node == 7 else 3)
    ]
    assert summary(sites, "n0:29500") == (
        "ranks: 26 on 9 nodes, rank 0 at n0:29500; gloo: n0 10.0.0.0 (ib0), n1 10.0.0.1 (ib0), "
        "n2 10.0.0.2 (ib0), n3 10.0.0.3 (ib0), 5 more nodes; devices of a node: "
        "cuda:0 cuda:1 cuda:2 (n0), but cuda:0 cuda:1 (n7)"
    )
    lines = table(sites).splitlines()
    assert lines[0].split("\t") == ["rank", "host", "address", "interface", "device"]
    assert lines[23].split("\t") == ["22", "n7", "10.0.0.7", "ib0", "cuda:1 NVIDIA H200 id71"]
    assert len(lines) == 27
