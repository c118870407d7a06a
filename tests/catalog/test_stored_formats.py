"""Formats that served weights are stored in: all that published measurements name."""

import tomllib
from pathlib import Path

import pytest

from ironlaw.catalog.figures import read_toml, source
from ironlaw.catalog.formats import stored_format
from ironlaw.catalog.models import model_entry
from ironlaw.errors import UserError

MEASURED = tomllib.loads(Path(__file__).with_name("measured_names.toml").read_text(encoding="utf-8"))["formats"].split()
FORMATS = read_toml("stored_formats.toml")["formats"]


def test_every_format_of_published_measurements_is_known_and_sourced():
    assert set(MEASURED) <= set(FORMATS)
    for name in FORMATS:
        found = stored_format(name)
        assert 2 <= found.bits <= 16 and source(found.source).title


@pytest.mark.parametrize(
    ("model", "name", "gibibytes"),
    # Sizes of published files: llama.cpp discussions 4167 and 15013; tools/quantize.
    [("llama-2-7b", "q4_0", 3.56), ("llama-2-7b", "q8_0", 6.67), ("llama-2-7b", "f16-gguf", 12.55),
     ("llama-3.1-8b", "q4_k_m", 4.58)],
)  # fmt: skip
def test_files_have_the_size_that_follows(model, name, gibibytes):
    size = model_entry(model)["parameters"] * stored_format(name).bytes_per_weight / 2**30
    assert size == pytest.approx(gibibytes, rel=0.03)


def test_an_unknown_format_names_the_nearest():
    with pytest.raises(UserError, match="q4_k_m"):
        stored_format("q4_k_n")
