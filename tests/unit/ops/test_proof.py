"""Before a run, implementations that are wrong or fail are replaced, and the log says so."""

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlbert.cli.bench import CONFIGS
from mlbert.config.bert_config import BertConfig
from mlbert.ops import api as ops
from mlbert.ops import by_time, device_cache, proof, reference
from mlbert.ops import forms as registry
from mlbert.ops.config import FORMS, Form
from mlbert.ops.problems import Problems, Sizes
from user_errors import user_error

CPU = torch.device("cpu")
OP = "layer_norm_dropout"
LARGE = BertConfig.from_json(CONFIGS / "large.json")


@pytest.fixture(autouse=True)
def nothing_refused(native_ops: None, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start with an empty cache and no refused implementation."""
    monkeypatch.setattr(registry, "_refused", {})


def prove(
    precision: str = "fp32",
    over_ranks: Callable[[Tensor], Any] = lambda _: None,
    choice: str = "auto",
) -> list[str]:
    """Verify the implementations. Return the log lines."""
    lines: list[str] = []
    proof.prove(choice, precision, LARGE, CPU, over_ranks, lines.append)
    return lines


def replace_form(
    monkeypatch: pytest.MonkeyPatch, form: Callable[..., Any], name: str = "native", op: str = OP
) -> None:
    """Replace an implementation of `op`, and verify only this op, to save time."""
    monkeypatch.setitem(registry._implementations[op], name, form)
    monkeypatch.setattr(registry, "ops", lambda: (op,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("op", [*Problems(CPU, torch.float32).differentiable(), "local attention"])
def test_runs_are_bit_equal_for_any_thread_count(op, dtype):
    problems = Problems(CPU, dtype)
    if op == "local attention":
        op = "attention"
        make, differentiated = problems.variants()[op][0]
    else:
        make, differentiated = problems.differentiable()[op]
    results = []
    for threads in (2, 2, 1):
        torch.set_num_threads(threads)
        arguments = list(make(0))
        leaves = [arguments[place].requires_grad_() for place in differentiated]
        for place in differentiated:
            # Some ops overwrite their input with its gradient.
            arguments[place] = arguments[place] * 1.0
        out = registry.form(op, "native")(*arguments)
        out = out[0] if isinstance(out, tuple) else out
        out.backward(torch.ones_like(out))
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "fp8"])
def test_correct_implementations_are_kept(precision):
    assert prove(precision) == []
    assert set(registry.selected().values()) == {"native"}


@pytest.mark.parametrize(
    "op",
    [
        pytest.param("dropout_add_layer_norm", marks=pytest.mark.slow),
        "feed_forward",
        "fp8_quantize",
        "fp8_gelu_backward",
        "fp8_quantize_sum",
        "gelu",
        "fp8_product_gelu",
        "fp8_product_gelu_backward",
        "fp8_product_slope",
        "fp8_product_slope_backward",
    ],
)
def test_interpreted_kernels_pass(use_triton, op):
    """Kernels of other ops are not verified here, because the interpreter takes minutes."""
    name = registry.select("slopes")[op]
    product_form = "slopes" if "slope" in op else "fused"
    assert name == (product_form if "product" in op else "triton")
    assert proof.check(op, name, CPU, torch.bfloat16) == ""


@pytest.mark.slow
@pytest.mark.parametrize("op", ["qkv_attention", "fp8_qkv_attention"])
def test_attention_that_sums_its_gradient_passes(use_triton, op):
    assert registry.select("qkv")[op] == "qkv"
    assert proof.check(op, "qkv", CPU, torch.bfloat16) == ""


def test_every_op_is_verified():
    problems = Problems(CPU, torch.bfloat16)
    assert {*problems.differentiable(), *problems.not_differentiable()} == set(registry.ops())


def test_gpu_is_verified_with_the_models_sizes():
    """On a GPU, kernels and algorithms depend on the sizes; on a CPU, the problems are small."""
    sizes = Sizes.of_run(LARGE, torch.device("cuda"))
    assert sizes == (1024, 16, 4096, 30522, 30528, None)
    assert Sizes.of_run(LARGE, CPU) == Sizes()
    problems = Problems(CPU, torch.bfloat16, sizes=sizes)
    arguments = {op: make(0) for op, (make, _) in problems.differentiable().items()}
    tokens = arguments["attention"][0].shape[0]
    assert tokens > 256, "too few for several blocks of every kernel"
    assert arguments["attention"][0].shape == (tokens, 3, 16, 64)
    assert arguments["feed_forward"][1].shape == (4096, 1024)
    assert (
        arguments["masked_cross_entropy"][0].shape[1]
        == arguments["embedding_sum"][3].shape[0]
        == 30528
    )
    assert problems.not_differentiable()["fp8_gelu"]()[0].shape == (tokens, 4096)


def test_wrong_window_is_refused(monkeypatch):
    def wider(*arguments: Any) -> Tensor:
        *rest, window, rotations = arguments
        return reference.attention(*rest, window + 1, rotations)

    def form(*arguments: Any) -> Tensor:
        return wider(*arguments) if len(arguments) > 7 else reference.attention(*arguments)

    replace_form(monkeypatch, form, op="attention")
    assert "output: rms error" in proof.check("attention", "native", CPU, torch.float32)


def wrong_gradient(x: Tensor, *settings: Any) -> Tensor:
    x = x * 1.0
    x.register_hook(lambda gradient: gradient * 1.01)
    return reference.layer_norm_dropout(x, *settings)


def nan_result(x: Tensor, *settings: Any) -> Tensor:
    out = reference.layer_norm_dropout(x, *settings)
    return torch.where(torch.arange(len(out))[:, None] == len(out) - 1, torch.nan, out)


def raises(*_: Any) -> Tensor:
    raise RuntimeError("no kernel image is available\nfor this device")


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda *settings: reference.layer_norm_dropout(*settings) * 1.001, "output: rms error"),
        (wrong_gradient, "gradient of argument 0: rms error"),
        (nan_result, "output: rms error nan"),
        (raises, "fails: RuntimeError: no kernel image is available"),
    ],
    ids=["result", "gradient", "NaN", "raises"],
)
def test_wrong_implementation_is_replaced_and_logged(monkeypatch, form, words):
    replace_form(monkeypatch, form)
    (line,) = prove()
    assert line.startswith(f"ops: {OP} runs plain: native {words}")
    assert "\n" not in line
    chosen = registry.selected()
    assert chosen.pop(OP) == "plain"
    assert set(chosen.values()) == {"native"}
    assert ops.select("auto")[OP] == "plain", "a later selection uses it again"
    assert f"({OP}: native {words}" in ops.describe()


def test_fp8_ops_are_verified_in_fp8_runs_only(monkeypatch):
    plain = registry.form("fp8_quantize", "plain")

    def with_wrong_columns(x: Tensor, *settings: Any) -> Any:
        copies = plain(x, *settings)
        return copies._replace(columns=copies.columns.flip(0))

    replace_form(monkeypatch, with_wrong_columns, op="fp8_quantize")
    assert prove("bf16") == []
    (line,) = prove("fp8")
    assert "fp8_quantize runs plain: native result 1" in line


def test_replacement_is_verified_too(monkeypatch):
    form = Form("", {"cpu": ("worst", "worse", "native")})
    monkeypatch.setitem(FORMS, "auto", form)
    replace_form(monkeypatch, raises, "worst")
    replace_form(monkeypatch, nan_result, "worse")
    first, second = prove()
    assert first.startswith(f"ops: {OP} runs worse: worst fails")
    assert second.startswith(f"ops: {OP} runs native: worse output")


def test_results_are_cached(monkeypatch):
    """The cache is specific to the device, the precision and the software."""
    replace_form(monkeypatch, wrong_gradient)
    lines = prove()
    monkeypatch.setattr(registry, "_refused", {})
    registry._selections.clear()
    checked: list[str] = []
    monkeypatch.setattr(proof, "check", lambda op, *_: checked.append(op) or "")
    assert prove() == lines
    assert not checked
    for change in (
        lambda: prove("bf16"),
        lambda: monkeypatch.setattr(device_cache, "_software", lambda: ("others",)),
    ):
        monkeypatch.setattr(registry, "_refused", {})
        change()
        prove()
        assert checked == [OP]
        checked.clear()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0\xff",
        b"[]",
        b'{"found": {}}',
        b'{"sha256": "0", "found": {"layer_norm_dropout native": ""}}',
        None,
    ],
)
def test_damaged_cache_is_rebuilt(own_cache, monkeypatch, content):
    replace_form(monkeypatch, wrong_gradient)
    lines = prove()
    (file,) = own_cache.glob("mlbert/proof-*.json")
    kept = json.loads(file.read_text())
    if content is None:  # a result that does not match the checksum
        content = json.dumps({**kept, "found": {**kept["found"], f"{OP} native": ""}}).encode()
    file.write_bytes(content)
    monkeypatch.setattr(registry, "_refused", {})
    assert prove() == [f"cache {file} is damaged or unreadable and will be rebuilt", *lines]
    assert json.loads(file.read_text()) == kept


def test_exceptions_are_not_cached(own_cache, monkeypatch):
    """The next run tries again, because the device may have been out of memory."""
    replace_form(monkeypatch, raises)
    prove()
    assert not (own_cache / "mlbert").exists()


def test_unwritable_cache_is_ignored(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert prove() == []


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return clock(native=..., plain=...), which sets the seconds that a call of `OP` takes,
    and times only this op.
    """
    now = [0.0]

    def time_launches(_: torch.device, work: Callable[[], object], launches: int) -> list[float]:
        start = now[0]
        work()
        return [now[0] - start]

    def set_times(**seconds: float) -> None:
        for name, taken in seconds.items():
            form = registry._implementations[OP][name]
            replace_form(
                monkeypatch,
                lambda *a, f=form, t=taken: now.__setitem__(0, now[0] + t) or f(*a),
                name,
            )

    monkeypatch.setattr(by_time, "time_launches", time_launches)
    return set_times


@pytest.mark.parametrize(
    ("native", "plain", "listed"),
    [
        (0.002, 0.005, "native: native 2 ms, plain 5 ms"),
        (0.007, 0.005, "plain: plain 5 ms, native 7 ms"),
        (0.0058, 0.005, "native: plain 5 ms, native 5.8 ms"),  # as fast, but for noise
    ],
)
def test_fastest_implementation_is_chosen(clock, monkeypatch, native, plain, listed):
    clock(native=native, plain=plain)
    lines = prove(choice="fastest")
    assert lines == [f"ops: {OP} runs {listed}"]
    assert registry.selected()[OP] == listed.partition(":")[0]
    monkeypatch.setattr(by_time, "time_launches", pytest.fail)
    assert prove(choice="fastest") == lines, "times are cached"


def test_fastest_on_the_slowest_rank_is_chosen_on_all(clock):
    clock(native=0.001, plain=0.005)

    def slow_native_elsewhere(tensor: Tensor) -> None:
        if tensor.is_floating_point():
            tensor.copy_(torch.maximum(tensor, torch.tensor([0.009, 0.003])))

    assert prove(choice="fastest", over_ranks=slow_native_elsewhere)
    assert registry.selected()[OP] == "plain"


@pytest.mark.parametrize("failure", ["wrong", "memory"])
def test_fastest_never_chooses_what_fails(clock, monkeypatch, failure):
    def out_of_memory(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    native = registry.form(OP, "native")
    clock(plain=0.005)
    replace_form(monkeypatch, nan_result if failure == "wrong" else native)
    if failure == "memory":  # at the model's sizes, not at those of the verification
        replace_form(monkeypatch, lambda x, *a: native(x, *a) if len(x) < 1000 else out_of_memory())
    assert f"{OP} runs plain: plain 5 ms, native inf ms" in prove(choice="fastest")[0]
    assert registry.selected()[OP] == "plain"


def test_implementation_that_fails_on_another_rank_is_replaced():
    rounds = []

    def fail_on_another_rank(failed: Tensor) -> None:
        rounds.append(failed.clone())
        failed[registry.ops().index("attention")] |= len(rounds) == 1

    (line,) = prove(over_ranks=fail_on_another_rank)
    assert line == "ops: attention runs plain: native failed verification on another rank"
    assert registry.selected()["attention"] == "plain"
    assert len(rounds) == 2
    assert not any(map(torch.any, rounds))


def test_ranks_can_write_the_cache_concurrently(own_cache):
    """Each reads a complete file after its own writing, whatever the others write meanwhile."""

    def store_and_load(number: int) -> int:
        device_cache.store("proof", CPU, {f"op {i}": "x" * 1000 * number for i in range(20)})
        return len(device_cache.load("proof", CPU, pytest.fail))

    with ThreadPoolExecutor(4) as pool:
        assert set(pool.map(store_and_load, [1, 2] * 50)) == {20}
    assert len(list((own_cache / "mlbert").iterdir())) == 1, "a temporary file is left"


def test_broken_device_is_a_user_error(monkeypatch):
    """After an illegal access, every later call fails, such as the one that checks the device."""
    replace_form(monkeypatch, raises)
    zeros = torch.zeros

    def broken(*shape: Any, device: Any = None, **options: Any) -> Tensor:
        if device is not None and shape == (1,):
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return zeros(*shape, device=device, **options)

    monkeypatch.setattr(torch, "zeros", broken)
    with user_error("device.broken", "the native kernel of layer_norm_dropout"):
        proof.check(OP, "native", CPU, torch.float32)
