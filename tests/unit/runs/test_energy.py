"""The energy of a run: zeus on a RAPL tree made here, objects with its interface for GPUs,
sums over machines.
"""

import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch

from mlbert.runs.energy import EnergyMeter, energy_words, summarize_energy
from programs import write_files
from training_settings import read_summary
from training_settings import run as run_train


@pytest.fixture
def counters(monkeypatch):
    """Replace zeus by one device: every reading adds 1 kJ to a GPU or 3 kJ to processors."""
    found = types.SimpleNamespace(readings=0)

    def read(index=None):
        found.readings += 1
        energy = types.SimpleNamespace(cpu_mj=3e6 * found.readings, dram_mj=None)
        return energy if index is None else 1e6 * found.readings

    found.get_total_energy_consumption = read
    found.cpus = [found]
    module = types.ModuleType("zeus.device")
    module.get_gpus = module.get_cpus = lambda: found
    monkeypatch.setitem(sys.modules, "zeus.device", module)
    return found


def measure(num_gpus):
    meter = EnergyMeter(num_gpus)
    meter.start()
    return meter, meter.stop()


def write_zone(folder, name, microjoules):
    values = {"name": name, "energy_uj": microjoules, "max_energy_range_uj": 2**38}
    write_files(folder, {file: f"{value}\n" for file, value in values.items()})


def test_zeus_reads_processors_and_memory_once(tmp_path, monkeypatch):
    from zeus.device import cpu
    from zeus.device.cpu import rapl

    def write(base):
        for number in (0, 1):
            zone = tmp_path / f"intel-rapl:{number}"
            write_zone(zone, f"package-{number}", base + number)
            write_zone(zone / f"intel-rapl:{number}:0", "core", base)
            write_zone(zone / f"intel-rapl:{number}:1", "dram", base // 10)
        write_zone(tmp_path / "intel-rapl:2", "psys", 5 * base)

    monkeypatch.setattr(rapl, "RAPL_DIR", str(tmp_path))
    monkeypatch.setattr(cpu, "_cpus", None)
    rapl.rapl_is_available.cache_clear()
    write(10_000_000)
    meter = EnergyMeter(0)
    meter.start()
    write(310_000_000)
    sums = meter.stop()
    for zone in cpu.get_cpus().cpus:
        for file in filter(None, (zone.rapl_file, zone.dram)):
            if file._wraparound_tracker is not None:
                file._wraparound_tracker._stop()
    rapl.rapl_is_available.cache_clear()
    seconds = sums.pop(-2)
    assert sums == pytest.approx([0, 600, 60, 0, 1, 1, 1])
    assert seconds > 0
    assert summarize_energy([*sums[:-1], 10.0, 1.0]) == pytest.approx(
        {"energy_joules": 660, "average_watts": 66, "cpu_joules": 600, "dram_joules": 60}
    )


def test_gpus_that_cannot_be_read_give_no_figure(counters, monkeypatch):
    _, numbers = measure(2)
    del numbers[-2]  # seconds
    assert numbers == [6e3, 9e3, 0, 1, 1, 0, 1], (
        "GPUs 1 + 2 kJ, then 4 + 5; processors 9 kJ, then 18"
    )
    monkeypatch.setattr(counters, "get_total_energy_consumption", lambda index: 1 / 0)
    meter, numbers = measure(2)
    assert [*numbers[:-2], numbers[-1]] == [0] * 6 + [1]
    words = "energy: not measured: ZeroDivisionError: division by zero"
    assert energy_words(summarize_energy(numbers), meter.reason) == words


@pytest.mark.parametrize(
    ("machines", "parts"),
    [
        ([[100, 10, 1, 1, 1, 1, 1]] * 2, {"gpu_joules": 200, "cpu_joules": 20, "dram_joules": 2}),
        ([[100, 10, 1, 1, 1, 1, 1], [100, 0, 0, 1, 0, 0, 1]], {"gpu_joules": 200}),
        ([[100, 10, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0, 1]], {}),
        ([[0] * 7] * 2, {}),
    ],
)
def test_only_what_every_machine_measured_counts(machines, parts):
    others = [EnergyMeter(8).stop() for _ in range(3)]  # ranks that measure nothing
    machines = [[*row[:-1], 4.0 * row[-1], row[-1]] for row in machines]
    sums = torch.tensor([*machines, *others], dtype=torch.float64).sum(dim=0).tolist()
    total = sum(parts.values())
    expected = {"energy_joules": total, "average_watts": total / 4, **parts} if parts else {}
    assert summarize_energy(sums) == expected


def run(folder, capsys):
    run_train(folder)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("energy: ")]
    log = (folder / "out" / "result_0.txt").read_text()
    assert "power_" not in log, (
        "MLPerf's keys are for meters of whole machines, in files of their own"
    )
    summary = read_summary(folder / "out").items()
    return lines, {name: value for name, value in summary if "joules" in name or "watts" in name}


def test_a_run_with_a_meter(tmp_path, capsys, counters):
    lines, numbers = run(tmp_path, capsys)
    assert counters.readings == 2
    assert numbers.pop("average_watts") > 0
    assert numbers == {"energy_joules": 3000, "cpu_joules": 3000}
    assert len(lines) == 1
    assert lines[0].startswith("energy: 3,000 J, ")
    assert lines[0].endswith(" W on average (processors)")


@pytest.mark.parametrize(("is_installed", "words"), [(True, "it was resumed"), (False, "")])
def test_a_rejected_measurement_needs_no_words_without_zeus(monkeypatch, is_installed, words):
    found = importlib.machinery.ModuleSpec("zeus", None) if is_installed else None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    meter = EnergyMeter(0)
    meter.reject("it was resumed")
    assert meter.reason == words


@pytest.mark.parametrize("missing", ["package", "meter"])
def test_without_a_meter_there_is_no_figure_and_a_line_only_with_zeus(
    tmp_path, capsys, monkeypatch, missing
):
    expected = []
    if missing == "package":
        monkeypatch.setitem(sys.modules, "zeus.device", None)
    else:
        from zeus.device.cpu import rapl

        monkeypatch.setattr(rapl, "RAPL_DIR", str(tmp_path / "none"))
        rapl.rapl_is_available.cache_clear()
        expected = ["energy: not measured: this machine has no meter that this user may read"]
    assert run(tmp_path, capsys) == (expected, {})
