"""Catalogued models and Hugging Face configs on the measured machine: assumptions are few, stated and replaceable."""

import sys
from pathlib import Path

import pytest

from ironlaw.errors import UserError
from ironlaw.plan import request
from ironlaw.plan.request import plan_request
from ironlaw.plan.request_types import Options

sys.path.insert(0, str(Path(__file__).parents[1] / "explain"))
from synthetic import make_profile


@pytest.fixture(autouse=True)
def _measured(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(request, "load_profile", make_profile)


def plan(what="gpt2", **options):
    return plan_request(what, on="this", options=Options(**options))


def test_a_catalogued_model_needs_no_config():
    answer = plan()
    assert [a["how_to_set"] for a in answer.more["assumed"]] == ["--seq", "--global-batch", "--steps or --tokens"]
    facts = answer.ledger.facts
    assert (facts["sequence"], facts["global_batch"], facts["steps"]) == (1024, 8, 1000)


def test_what_is_said_is_not_assumed():
    answer = plan(tokens="1M", sequence=256, global_batch=4, precision="fp32")
    assert answer.more["assumed"] == []
    facts = answer.ledger.facts
    assert (facts["sequence"], facts["global_batch"], facts["precision"]) == (256, 4, "fp32")
    assert facts["steps"] == 977  # 1e6 / 1,024, rounded up


def test_a_config_file_is_planned_as_before_and_options_replace_its_keys(tmp_path):
    file = tmp_path / "run.toml"
    model = '[model]\nname = "tiny"\nlayers = 4\nhidden = 256\nheads = 8\nvocab = 4096\ncontext = 256\n'
    file.write_text(model + "[train]\nsteps = 20\nglobal_batch = 8\n")
    assert plan(str(file)).ledger.facts["steps"] == 20 and plan(str(file)).more["assumed"] == []
    assert plan(str(file), steps=5, global_batch=2).ledger.facts["global_batch"] == 2


@pytest.mark.parametrize("option", [{"layout": "dp=2"}, {"engine": "nemo"}, {"emit": "megatron"}, {"precision": "fp8"}])
def test_options_of_clusters_are_refused(option):
    with pytest.raises(UserError, match=r"cluster|measured in"):
        plan(**option)


def test_options_that_contradict_the_config_are_one_line(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text('[model]\nname = "gpt2"\n[train]\nmicro_batch = 4\nglobal_batch = 8\n')
    with pytest.raises(UserError, match=r"larger than train\.global_batch"):
        plan(str(file), global_batch=2)
