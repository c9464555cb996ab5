"""Where each rank runs: its machine, network address and device, in one line and as a table.

Does not import torch.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import astuple, dataclass

MOST_NAMED_NODES = 4  # in the line
_COLUMNS = ("rank", "host", "address", "interface", "device")


@dataclass(frozen=True)
class RankSite:
    """Where one rank runs.

    Attributes:
        host: its machine, under its launcher's name.
        address: at which the other ranks reach it; empty for a single machine.
        interface: the network interface with this address, which gloo uses; empty if it has no
            name.
        device: ``cpu``, or ``cuda:3`` and the GPU's name and identifier.
    """

    host: str
    address: str
    interface: str
    device: str

    def to_text(self) -> str:
        """Return it as JSON."""
        return json.dumps(astuple(self))

    @classmethod
    def from_text(cls, text: str) -> RankSite:
        """Return what `to_text` wrote."""
        return cls(*json.loads(text))


def table(sites: Sequence[RankSite]) -> str:
    """Return a line for each rank, in tab-separated columns."""
    rows = ["\t".join((str(rank), *astuple(site))) for rank, site in enumerate(sites)]
    return "\n".join(["\t".join(_COLUMNS), *rows]) + "\n"


def summary(sites: Sequence[RankSite], head: str) -> str:
    """Describe all ranks in one line.

    Args:
        sites: of each rank.
        head: where the ranks look for rank 0, such as ``node1:29500``.
    """
    nodes: dict[str, list[RankSite]] = {}
    for site in sites:
        nodes.setdefault(site.host, []).append(site)
    named = [
        f"{host} {ranks[0].address} ({ranks[0].interface or 'no name'})"
        for host, ranks in list(nodes.items())[:MOST_NAMED_NODES]
    ]
    if len(nodes) > MOST_NAMED_NODES:
        named.append(f"{len(nodes) - MOST_NAMED_NODES} more nodes")
    count = "1 node" if len(nodes) == 1 else f"{len(nodes)} nodes"
    return (
        f"ranks: {len(sites)} on {count}, rank 0 at {head}; gloo: {', '.join(named)}; "
        f"devices of a node: {_devices(list(nodes.values()))}"
    )


def _devices(nodes: Sequence[Sequence[RankSite]]) -> str:
    """Return the devices of the ranks of a node, or of the first two that differ."""
    kinds: dict[str, str] = {}  # devices -> the first node that has these
    for ranks in nodes:
        names = " ".join(dict.fromkeys(site.device.partition(" ")[0] for site in ranks))
        kinds.setdefault(names, ranks[0].host)
    if len(kinds) == 1:
        return next(iter(kinds))
    first, second = list(kinds.items())[:2]
    return f"{first[0]} ({first[1]}), but {second[0]} ({second[1]})"
