"""The diffs beside docs/extending.md: as few files as promised, and what they add works in a copy of the package."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/extending.md").read_text()
MOST_FILES = {  # all, and those that are code
    "An accelerator": (2, 0), "An optimizer": (3, 3), "A number format": (3, 3), "A kind of attention": (8, 8),
    "A kind of parallelism": (8, 8), "A Hugging Face family": (1, 1), "A remedy": (1, 1), "A diagnosis": (2, 1),
}  # fmt: skip


def file_of(what):
    return what.partition(" ")[2].lower().replace(" ", "-") + ".diff"


DIFFS = {what: (ROOT / "docs/extending" / file_of(what)).read_text() for what in MOST_FILES}

ADDED = {
    "An accelerator": """
        from ironlaw.api import plan
        assert plan("gpt2", on="8xexample-200", layout="dp=8").step_seconds.value > 0
    """,
    "An optimizer": """
        from ironlaw.train.optimizer import build_optimizer
        from ironlaw.workload.optimizers import OptimizerConfig, state_bytes
        from ironlaw.model.parameters import model_parameters
        config, model = OptimizerConfig(name="nadam", lr=1e-2), Decoder(tiny())
        optimizer = build_optimizer(model, config)
        tokens = torch.arange(32).reshape(2, 16)
        losses = []
        for _ in range(3):
            losses.append(model(tokens, tokens))
            losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[2] < losses[0]
        held = [t for state in optimizer.state.values() for t in state.values()]
        assert sum(t.numel() * t.element_size() for t in held) == state_bytes(model_parameters(tiny()), config)
        import pytest
        test = f"{ROOT}/tests/train/test_optimizer.py::test_an_update_holds_what_is_planned[nadam]"
        assert not pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", test])
        from ironlaw.config import build_config
        tables = {"model": {"name": "gpt2"}, "data": {"mock": True}, "optimizer": {"name": "nadam", "beta1": 0.8}}
        assert not build_config(tables).unused_keys()
    """,
    "A number format": """
        from ironlaw.catalog.formats import number_format
        from ironlaw.numerics import quantize
        assert number_format("mxfp4_e1m2").bits_per_element == 4.5
        assert len(quantize(torch.randn(64, 16), "mxfp4_e1m2").dequantize().unique()) > 7
    """,
    "A kind of attention": """
        from ironlaw.workload.blocks import Shape
        from ironlaw.workload.module_source import Input
        from ironlaw.workload.operations import saved_bytes, total_flops
        from ironlaw.model.parameters import model_parameters
        from ironlaw.workload.program import training_operations
        from ironlaw.workload.trace import trace
        gated = tiny(attention_gate=True)
        class Step(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.model = Decoder(gated)
            def forward(self, tokens):
                return self.model(tokens, tokens)
        shapes = [(name, tuple(p.shape)) for name, p in Decoder(gated).named_parameters()]
        assert [(p.name, p.shape) for p in model_parameters(gated)] == shapes
        assert gated.parameters == sum(p.elements for p in model_parameters(gated))
        for precision, cast in (("fp32", "as is"), ("bf16", "bf16")):
            listed = training_operations(Shape(gated, 2, 16, precision))
            traced = trace(Step, [Input("tokens", (2, 16), "int64")], precision=cast).operations
            assert saved_bytes(traced) - saved_bytes(listed) == 4  # the sum of the loss weights
            assert not sum((op.saved_bytes - op.frees_saved_bytes) * op.repeat for op in listed)
            assert total_flops(listed) == total_flops(traced)
        from ironlaw.serve.config import ServeConfig
        from ironlaw.serve.engine import Engine
        from ironlaw.serve.loading import prepare
        from ironlaw.serve.request import SamplingParams
        model, answer, config = Decoder(gated).eval(), [7, 9, 3], ServeConfig(device="cpu")
        for block in model.blocks:
            for layer in block.attention.children():
                torch.nn.init.normal_(layer.weight)
        while len(answer) < 9:
            answer.append(int(model(torch.tensor([answer]))[0, -1].argmax()))
        served = Engine(prepare(model, config, "gated"), config)
        assert list(served.stream(answer[:3], SamplingParams(max_tokens=6, temperature=0))) == answer[3:]
    """,
    "A kind of parallelism": """
        from ironlaw.api import plan
        from ironlaw.config import LayoutConfig
        from ironlaw.workload.schedule import passes
        assert LayoutConfig(pp=2, virtual_stages=2, schedule="looped")
        first = passes("looped", 2, 2, 4)[0]
        assert [p.stage for p in first[:8]] == [0] * 4 + [2] * 4
        planned = [plan("gpt2", on="8xh100-sxm-80gb", layout=f"dp=4 pp=2 virtual_stages=2 schedule={name}")
                   for name in ("1f1b", "looped")]
        assert planned[0].peak_bytes.value < planned[1].peak_bytes.value
    """,
    "A Hugging Face family": """
        import json, pathlib, tempfile
        from ironlaw.model.huggingface.configs import read_config
        fields = {"model_type": "example", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8,
                  "intermediate_size": 128, "vocab_size": 100, "max_position_embeddings": 32}
        file = pathlib.Path(tempfile.mkdtemp()) / "config.json"
        file.write_text(json.dumps(fields))
        model = read_config(file)
        assert model.qk_norm and model.tied and model.kv_heads == 8
    """,
    "A remedy": """
        from types import SimpleNamespace
        from ironlaw.explain.remedies import REMEDIES
        (tied,) = [kind for kind in REMEDIES if kind.name == "tied"]
        now = SimpleNamespace(config=SimpleNamespace(model=tiny(tied=False)))
        assert list(tied.propose(now)) == [{"model.tied": True}]
    """,
    "A diagnosis": """
        from types import SimpleNamespace
        from ironlaw.explain.diagnose import RULES
        from ironlaw.observe.habits import useless_biases
        found = useless_biases(torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2)))
        facts = {"useless_biases": found}
        run = SimpleNamespace(run=SimpleNamespace(facts=facts), fact=facts.get, step=1.0)
        (rule,) = [rule for rule in RULES if rule.name == "useless_biases"]
        assert found == ["0"] and rule.measure(run) >= rule.minimum
    """,
}
COMMON = f"""
ROOT = {str(ROOT)!r}
import torch
from ironlaw.model.config import ModelConfig
from ironlaw.model.transformer import Transformer as Decoder
def tiny(**fields):
    return ModelConfig(**dict(name="tiny", vocab=64, hidden=32, layers=2, heads=4, context=16) | fields)
"""


def touched(diff):
    return re.findall(r"^\+\+\+ b/(\S+)", diff, re.MULTILINE)


@pytest.mark.parametrize("what", MOST_FILES)
def test_as_few_files_as_promised(what):
    files, (most, most_code) = touched(DIFFS[what]), MOST_FILES[what]
    assert 0 < len(files) <= most
    assert sum(file.endswith(".py") for file in files) <= most_code
    assert re.search(rf"\(extending/{file_of(what)}\) \| {len(files)}[ ,]", PAGE), (
        "the table counts other files than the diff"
    )


@pytest.fixture(scope="module")
def extended(tmp_path_factory):
    """A copy of the package with every diff applied."""
    copy = tmp_path_factory.mktemp("extended")
    shutil.copytree(ROOT / "src", copy / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for what, diff in DIFFS.items():
        done = subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=copy, capture_output=True, check=False)
        assert done.returncode == 0, f"{what}: {done.stderr}"
    return copy


@pytest.mark.slow
def test_what_the_diffs_add_works(extended):
    steps = ["def one():" + body.rstrip() + "\none()\n" for body in ADDED.values()]
    code = COMMON + "".join(steps)
    environment = os.environ | {"PYTHONPATH": str(extended / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], text=True, cwd=extended, capture_output=True, check=False,
                          env=environment)  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_a_new_schedule_trains(extended, user_cache, tiny_file):
    settings = ["layout.pp=2", "layout.virtual_stages=2", "layout.schedule=looped", "model.layers=4"]
    settings += ["train.micro_batch=1", "train.global_batch=4"]
    environment = os.environ | {"PYTHONPATH": str(extended / "src"), "OMP_NUM_THREADS": "1"}
    command = ["torchrun", "--standalone", "--nproc-per-node", "2", "-m", "ironlaw", "train", str(tiny_file())]
    command += ["--out", "run", *(word for setting in settings for word in ("--set", setting))]
    done = subprocess.run(command, text=True, cwd=extended, capture_output=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
