"""PRECISION=auto times both formats of a processor that has them, once, and takes the faster."""

import re

import pytest

from mlbert.host import native
from mlbert.ops import precision
from mlbert.recipes import auto_precision
from training_settings import run


@pytest.fixture
def timings(monkeypatch, tmp_path):
    """The formats that are timed, on a processor that multiplies bfloat16."""
    cache = f"precision-{tmp_path.name}"
    monkeypatch.setattr(auto_precision, "CACHE", cache)
    monkeypatch.setattr(auto_precision, "has_bf16_products", lambda: True)
    monkeypatch.setattr(auto_precision, "ENOUGH_SECONDS", 0.01)
    measure = auto_precision._seconds
    timed = []

    def recorded(build, context, *rest):
        timed.append(context.precision)
        return measure(build, context, *rest)

    monkeypatch.setattr(auto_precision, "_seconds", recorded)
    yield timed
    for path in native.cache_folder().glob(f"{cache}-*"):
        path.unlink()


def test_the_faster_format_is_timed_once_and_used(timings, tmp_path, capsys):
    lines = []
    for name in ("a", "b"):
        assert run(tmp_path, name, precision="auto", max_steps=1) == 1
        said = " ".join(capsys.readouterr().out.split())
        lines.append(re.search(r"precision: (\w+) \(.*?fp32 ([\d.]+) ms, bf16 ([\d.]+) ms\)", said))
    assert timings == ["fp32", "bf16"]
    assert lines[0][0] == lines[1][0]
    chosen, wide, narrow = lines[0].groups()
    assert chosen == ("bf16" if auto_precision.MARGIN * float(narrow) < float(wide) else "fp32")
    log = (tmp_path / "a/result_0.txt").read_text()
    assert f'"{precision.compute_dtype(chosen)}"' in log


def test_a_named_format_and_other_processors_are_not_timed(timings, tmp_path, monkeypatch):
    assert run(tmp_path, "named", precision="fp32", max_steps=1) == 1
    monkeypatch.setattr(auto_precision, "has_bf16_products", lambda: False)
    assert run(tmp_path, "auto", precision="auto", max_steps=1) == 1
    assert timings == []
