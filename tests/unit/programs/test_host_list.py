"""Hosts that the user names in an option or a file."""

from pathlib import Path

import pytest

from mlbert.programs.host_list import HostList, parse_hosts, read_hostfile
from user_errors import user_error


def test_hosts_of_an_option_and_of_a_file(tmp_path: Path) -> None:
    assert parse_hosts("a, me@b.example ,10.0.0.3") == HostList(("a", "me@b.example", "10.0.0.3"))
    assert parse_hosts("me@b.example").first_address == "b.example"
    path = tmp_path / "hosts"
    path.write_text("# two nodes\nnode1 slots=8\n\n  node2   slots=8  # the new one\n")
    assert read_hostfile(path) == HostList(("node1", "node2"), 8)
    path.write_text("node1\nnode2\n")
    assert read_hostfile(path) == HostList(("node1", "node2"), None)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "config.missing"),
        (" , ", "config.missing"),
        ("a,a", "config.duplicate"),
        ("a,-oProxyCommand=x", "config.value"),
        ("a b", "config.value"),
        ("a;b", "config.value"),
        ("a@b@c", "config.value"),
    ],
)
def test_a_text_that_is_not_a_list_of_hosts(text: str, code: str) -> None:
    with user_error(code, "--hosts"):
        parse_hosts(text)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("# nothing\n", "config.missing"),
        ("a slots=8\nb slots=4\n", "config.unsupported"),
        ("a slots=8\nb\n", "config.unsupported"),
        ("a slots=0\n", "config.file"),
        ("a slots=1e3\n", "config.file"),
        ("a 8\n", "config.file"),
        ("a slots=2 max_slots=4\n", "config.file"),
        ("a:\x00 slots=2\n", "config.value"),
    ],
)
def test_a_file_that_is_not_a_list_of_hosts(tmp_path: Path, text: str, code: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(text)
    with user_error(code, path):
        read_hostfile(path)


def test_a_file_that_does_not_exist(tmp_path: Path) -> None:
    with user_error("file.unreadable", tmp_path / "hosts"):
        read_hostfile(tmp_path / "hosts")
