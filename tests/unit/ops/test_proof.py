"""Before a run every chosen implementation proves itself: what is wrong, fails or damages is replaced, and told."""

from __future__ import annotations

import json
import multiprocessing
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlbert.cli.bench import CONFIGS
from mlbert.config.bert_config import BertConfig
from mlbert.ops import api as ops
from mlbert.ops import device_cache, proof, reference
from mlbert.ops import forms as registry
from mlbert.ops.proof import Problems, Sizes
from user_errors import user_error

CPU = torch.device("cpu")
OP = "layer_norm_dropout"
LARGE = BertConfig.from_json(CONFIGS / "large.json")


@pytest.fixture(autouse=True)
def own_cache(native_ops, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of this test's own, and the choice as it was afterwards."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(registry, "_refused", {})
    yield
    monkeypatch.undo()
    ops.select("auto")


def alone(failed: Tensor) -> None:
    """There is no other rank."""


def proven(precision: str = "fp32", over_ranks: Callable[[Tensor], Any] = alone) -> list[str]:
    """What is told of a proof."""
    said: list[str] = []
    proof.prove("auto", precision, LARGE, CPU, over_ranks, said.append)
    return said


def damage(monkeypatch: pytest.MonkeyPatch, form: Callable[..., Any], name: str = "native", op: str = OP) -> None:
    """An implementation becomes another; no other op is proven, to save time."""
    monkeypatch.setitem(registry._implementations[op], name, form)
    monkeypatch.setattr(registry, "ops", lambda: (op,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", Problems(CPU, torch.float32).differentiable())
def test_runs_are_bit_equal_for_any_thread_count(op: str, dtype: torch.dtype) -> None:
    make, differentiated = Problems(CPU, dtype).differentiable()[op]
    results = []
    for threads in (2, 2, 1):
        torch.set_num_threads(threads)
        arguments = list(make(0))
        leaves = [arguments[place].requires_grad_() for place in differentiated]
        for place in differentiated:
            arguments[place] = arguments[place] * 1.0  # some ops write their gradient over it
        out = registry.form(op, "native")(*arguments)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_right_ones_stay(precision: str) -> None:
    assert proven(precision) == []
    assert set(registry.selected().values()) == {"native"}


@pytest.mark.parametrize(
    "op",
    [
        pytest.param("dropout_add_layer_norm", marks=pytest.mark.slow),
        *("feed_forward", "fp8_quantise", "fp8_gelu_backward", "fp8_quantise_sum", "gelu"),
    ],
)
def test_interpreted_kernels_pass(use_triton: None, op: str) -> None:
    """The others take the interpreter minutes."""
    assert registry.select("triton")[op] == "triton"
    assert proof.check(op, "triton", CPU, torch.bfloat16) == ""


def test_every_op_has_a_problem() -> None:
    problems = Problems(CPU, torch.bfloat16)
    assert {*problems.differentiable(), *problems.not_differentiable()} == set(registry.ops())


def test_a_gpu_verifies_the_sizes_of_the_run() -> None:
    """Kernels and algorithms depend on them; on a CPU they are arguments, and problems are small."""
    sizes = Sizes.of_run(LARGE, torch.device("cuda"))
    assert sizes == (1024, 16, 4096, 30522, 30528)
    assert Sizes.of_run(LARGE, CPU) == Sizes()
    problems = Problems(CPU, torch.bfloat16, sizes=sizes)
    arguments = {op: make(0) for op, (make, _) in problems.differentiable().items()}
    tokens = arguments["attention"][0].shape[0]
    assert tokens > 256, "several blocks of every kernel"
    assert arguments["attention"][0].shape == (tokens, 3, 16, 64)
    assert arguments["feed_forward"][1].shape == (4096, 1024)
    assert arguments["masked_cross_entropy"][0].shape[1] == arguments["embedding_sum"][3].shape[0] == 30528
    assert problems.not_differentiable()["fp8_gelu"]()[0].shape == (tokens, 4096)


def wrong_gradient(x: Tensor, *settings: Any) -> Tensor:
    x = x * 1.0
    x.register_hook(lambda gradient: gradient * 1.01)
    return reference.layer_norm_dropout(x, *settings)


def not_a_number(x: Tensor, *settings: Any) -> Tensor:
    out = reference.layer_norm_dropout(x, *settings)
    return torch.where(torch.arange(len(out))[:, None] == len(out) - 1, torch.nan, out)


def wrong(*settings: Any) -> Tensor:
    return reference.layer_norm_dropout(*settings) * 1.001


def raises(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor this device")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (wrong, "output: rms error"),
        (wrong_gradient, "gradient of argument 0: rms error"),
        (not_a_number, "output: rms error nan"),
        (raises, "fails: RuntimeError: no kernel image is available"),
    ],
    ids=["result", "gradient", "NaN", "raises"],
)
def test_a_wrong_implementation_is_replaced_and_reported(
    monkeypatch: pytest.MonkeyPatch, form: Callable[..., Any], words: str
) -> None:
    damage(monkeypatch, form)
    (line,) = proven()
    assert line.startswith(f"ops: {OP} runs plain: native {words}")
    assert "\n" not in line
    chosen = registry.selected()
    assert chosen.pop(OP) == "plain"
    assert set(chosen.values()) == {"native"}
    assert ops.select("auto")[OP] == "plain", "whoever selects later"
    assert f"({OP}: native {words}" in ops.describe()


def test_fp8_ops_are_held_to_their_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = registry.form("fp8_quantise", "plain")

    def transposed_wrongly(x: Tensor, *settings: Any) -> Any:
        copies = plain(x, *settings)
        return copies._replace(columns=copies.columns.flip(0))

    damage(monkeypatch, transposed_wrongly, op="fp8_quantise")
    assert proven("bf16") == [], "nobody calls it"
    (line,) = proven("fp8")
    assert "fp8_quantise runs plain: native result 1" in line


def test_the_next_one_in_order_is_proven_in_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    preferences = {**registry._PREFERENCES, "cpu": {"auto": ("worst", "worse", "native")}}
    monkeypatch.setattr(registry, "_PREFERENCES", preferences)
    damage(monkeypatch, raises, "worst")
    damage(monkeypatch, not_a_number, "worse")
    first, second = proven()
    assert first.startswith(f"ops: {OP} runs worse: worst fails")
    assert second.startswith(f"ops: {OP} runs native: worse output")


def test_a_cached_result_is_not_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """For a device, a precision and these sources."""
    damage(monkeypatch, wrong)
    said = proven()
    monkeypatch.setattr(registry, "_refused", {})
    registry._selections.clear()
    checked: list[str] = []
    monkeypatch.setattr(proof, "check", lambda op, *_: checked.append(op) or "")
    assert proven() == said
    assert not checked
    for change in (lambda: proven("bf16"), lambda: monkeypatch.setattr(device_cache, "_software", lambda: ("others",))):
        monkeypatch.setattr(registry, "_refused", {})
        change()
        proven()
        assert checked == [OP]
        checked.clear()


@pytest.mark.parametrize(
    "content",
    [b"", b"\0\xff", b"[]", b'{"found": {}}', b'{"sha256": "0", "found": {"layer_norm_dropout native": ""}}', None],
)
def test_a_damaged_cache_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes | None
) -> None:
    damage(monkeypatch, wrong)
    said = proven()
    (file,) = (tmp_path / "mlbert").glob("proof-*.json")
    kept = json.loads(file.read_text())
    if content is None:  # one bit of what was found
        content = json.dumps({**kept, "found": {**kept["found"], f"{OP} native": ""}}).encode()
    file.write_bytes(content)
    monkeypatch.setattr(registry, "_refused", {})
    reported, *others = proven()
    assert re.fullmatch(rf"cache {file} is damaged or unreadable and will be rebuilt", reported)
    assert others == said
    assert json.loads(file.read_text()) == kept, "it is whole again"


def test_a_failed_check_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have lacked memory."""
    damage(monkeypatch, raises)
    proven()
    assert not (tmp_path / "mlbert").exists()


def test_a_cache_that_cannot_be_written_does_not_fail_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert proven() == []


def test_ranks_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails on another rank is replaced here too."""
    rounds: list[Tensor] = []

    def with_another(failed: Tensor) -> None:
        rounds.append(failed.clone())
        if len(rounds) == 1:
            failed[registry.ops().index("attention")] = 1

    (line,) = proven(over_ranks=with_another)
    assert line == "ops: attention runs plain: native failed verification on another rank"
    assert registry.selected()["attention"] == "plain"
    assert len(rounds) == 2
    assert not any(map(torch.any, rounds))


def store(folder: str, number: int) -> None:
    """Writes again and again, as ranks may."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", folder)
        for _ in range(50):
            device_cache.store("proof", CPU, {f"op {i}": "x" * 1000 * number for i in range(20)})


def fail(text: str) -> None:
    raise AssertionError(text)


def test_two_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=store, args=(str(tmp_path), number)) for number in (1, 2)]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        found = device_cache.load("proof", CPU, fail)
        assert len(found) in (0, 20)
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert len(device_cache.load("proof", CPU, fail)) == 20
    assert len(list((tmp_path / "mlbert").iterdir())) == 1, "nothing half-written is left"


def test_a_broken_device_ends_the_run_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access every later call fails: here the one that looks whether the device still works."""
    damage(monkeypatch, raises)
    zeros = torch.zeros

    def broken(*shape: Any, device: Any = None, **options: Any) -> Tensor:
        if device is not None and shape == (1,):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return zeros(*shape, device=device, **options)

    monkeypatch.setattr(torch, "zeros", broken)
    with user_error("device.broken", "the native kernel of layer_norm_dropout"):
        proof.check(OP, "native", CPU, torch.float32)
