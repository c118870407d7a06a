"""Our own transposition gives PyTorch's, of any shape and on any number of threads; a weight gradient asks for it."""

from __future__ import annotations

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from ironlaw.kernels import transpose
from ironlaw.kernels.transpose import transposed
from ironlaw.model.linear import onednn_available, onednn_weight_gradient


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("shape", [(1, 1), (5, 40), (40, 5), (16, 16), (64, 48), (67, 35), (0, 16)])
def test_it_is_transposed(shape: tuple[int, int], compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(transpose, "_compiled", lambda: None)
    threads = torch.get_num_threads()
    strided = torch.randn(shape[1], shape[0]).t()
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            for x in (torch.randn(shape), strided, strided.double()):
                assert torch.equal(transposed(x), x.t()) and transposed(x).is_contiguous()
    finally:
        torch.set_num_threads(threads)


@pytest.mark.skipif(not onednn_available(), reason="this PyTorch is built without oneDNN")
def test_a_weight_gradient_copies_nothing_on_one_core() -> None:
    if transpose._compiled() is None:
        pytest.skip("there is no C compiler")
    for outputs, inputs in ((32, 48), (48, 32)):
        gradient, x = torch.randn(64, outputs), torch.randn(64, inputs)
        with profile() as recorded:
            onednn_weight_gradient(gradient, x)
        names = {event.name for event in recorded.events()}
        assert "ironlaw::transposed" in names and "aten::copy_" not in names


def test_a_compiled_model_calls_it() -> None:
    x = torch.randn(20, 33)
    compiled = torch.compile(lambda x: transposed(x) * 2, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), x.t() * 2)


def test_all_sources_see_vectors_of_one_width_on_any_processor() -> None:
    if (compiler := shutil.which("cc")) is None or platform.machine() != "x86_64":
        pytest.skip("there is no C compiler for x86")
    folder = Path(transpose.__file__).parent
    for flags, lanes in (
        ("-mavx2", 8), ("-mavx2 -mavx512f -mno-avx512bw", 8), ("-mavx512f -mavx512bw", 16)
    ):  # fmt: skip
        for source in ("attention.c", "product.c", "transpose.c"):
            words = [compiler, "-E", "-dM", "-mfma", "-mf16c", *flags.split(), str(folder / source)]
            seen = subprocess.run(words, check=True, capture_output=True, text=True).stdout
            assert f"#define LANES {lanes}\n" in seen, (source, flags)
