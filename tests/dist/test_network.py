"""The network benchmark on three ranks that pretend to be on different hosts (an odd ring)."""

from __future__ import annotations

from harness import run_ranks

HOSTS = ["n1", "n2", "n3"]


def test_every_link_is_measured(tmp_path):
    results = run_ranks("network_program:measure_as", 3, tmp_path, hosts=HOSTS)
    reports = [result.value for result in results]
    assert reports[0] == reports[1] == reports[2]
    assert list(reports[0]["nodes"]) == HOSTS
    assert all(speed > 0 for speed in reports[0]["nodes"].values())
    assert list(reports[0]["reduce"]) == [str(2**20)]


def test_ranks_of_one_host_have_no_link(tmp_path):
    results = run_ranks("network_program:measure_as", 2, tmp_path, hosts=["n1", "n1"])
    assert results[0].value["nodes"] == {}
