"""The network test's verdict."""

from mlbert.programs.bench.network import NetworkReport


def test_a_slow_node_is_named():
    report = NetworkReport({2**20: 5.0}, {"n1": 10.0, "n2": 9.0, "n3": 3.0, "n4": 10.5})
    assert report.slow == ["n3"]
    assert report.lines()[0] == "all-reduce of 1 MiB: 5.00 GB/s"
    assert report.lines()[-1] == "slowest node: n3 (3.00 GB/s); slow: n3"
    alike = NetworkReport({}, {"n1": 10.0, "n2": 9.0})
    assert alike.slow == []
    assert alike.lines()[-1] == "slowest node: n2 (9.00 GB/s); no node is far below the others"
    assert NetworkReport({2**20: 5.0}, {}).lines() == ["all-reduce of 1 MiB: 5.00 GB/s"], "one node has no links"
