"""Parsing of a user's own module for planning: the function that builds it, and its inputs.

    resolve_module("my_package.models:build")   # the module, or a function without arguments that returns it
    parse_input("tokens=8x2048:int64")          # Input("tokens", (8, 2048), "int64")

Nothing here imports torch; importing the user's package usually does.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ironlaw.errors import MAX_INTEGER, UserError, did_you_mean, shortened

DTYPES = (
    "float32", "float64", "float16", "bfloat16",
    "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""PyTorch's names of element types."""

SHORT_DTYPES = {"fp32": "float32", "fp64": "float64", "fp16": "float16", "bf16": "bfloat16", "long": "int64",
                "int": "int32", "float": "float32", "half": "float16"}  # fmt: skip

VALUES = ("zeros", "ones", "positions", "edges")
"""Names for the values of an input."""

EXAMPLES = "tokens=8x2048:int64 or image=32x3x224x224"


@dataclass(frozen=True)
class Input:
    """One input tensor of a module: the name of its argument, its shape and its element type.

    `values`: "zeros", "ones", "positions" (0, 1, 2, ... along the last dimension), "edges" (a graph without loops) or
    an exclusive upper bound of random values; "": chosen by the input's name (`trace_inputs`).
    """

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    values: str = ""


def parse_input(text: str) -> Input:
    """Parse `NAME=SIZExSIZE:DTYPE:VALUES`. The default dtype is float32; the shape "scalar" is a single number.

    A dotted name is an element of a list or a dict: `images.0=3x224x224`, `targets.0.boxes=4x4`.
    """
    match = re.fullmatch(r"\s*([A-Za-z_][\w.]*)\s*=\s*([^:]+?)\s*(?::\s*([\w.]+)\s*)?(?::\s*(\w+)\s*)?", text)
    if match is None:
        raise UserError(f"cannot read input '{text}': write NAME=SIZES:DTYPE, for example {EXAMPLES}")
    name, sizes, dtype = match[1], match[2].lower(), (match[3] or "float32").removeprefix("torch.")
    dtype, values = SHORT_DTYPES.get(dtype, dtype), match[4] or ""
    if dtype not in DTYPES:
        raise UserError(f"input '{text}' has an unknown dtype '{dtype}': {did_you_mean(dtype, DTYPES)}")
    if values and values not in VALUES and not (values.isdecimal() and len(values) < 11 and 0 < int(values) < 2**31):
        known = ", ".join(VALUES)
        raise UserError(f"input '{text}' has unknown values '{values}': write {known} or a number to draw below")
    if sizes == "scalar":
        return Input(name, (), dtype, values)
    parts = [part.strip() for part in sizes.split("x")]
    shape = tuple(int(part) if part.isdecimal() and len(part) < 17 else 0 for part in parts)
    if not 0 < math.prod(shape) <= MAX_INTEGER:
        raise UserError(
            f"cannot read the sizes of input '{shortened(text)}': write positive numbers joined by x, as in {EXAMPLES}"
        )
    return Input(name, shape, dtype, values)


def read_inputs(texts: Sequence[str]) -> Any:
    """Parse the values of `--input`: descriptions of tensors, or one `package.module:function` returning the inputs."""
    functions = [text for text in texts if re.fullmatch(r"[\w.]+:[\w.]+", text)]
    if not functions:
        return [parse_input(text) for text in texts]
    if len(texts) > 1:
        raise UserError(f"{functions[0]} returns all inputs: give no other --input")
    try:
        made = resolve_module(functions[0])()
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{functions[0]} fails: {type(error).__name__}: {_one_line(error)}: it returns the inputs"
        ) from error
    return made if isinstance(made, dict | list | tuple) else [made]


def resolve_module(spec: str) -> Callable[..., Any]:
    """Import the module, or the function that builds it, named by `package.module:attribute`.

    The current folder is importable, as with `python -m`.
    """
    where, colon, attribute = spec.partition(":")
    if not colon or not where or not attribute:
        raise UserError(f"cannot read '{spec}': write PACKAGE.MODULE:FUNCTION, for example my_package.models:build")
    if where.endswith(".py"):
        raise UserError(f"'{where}' is a file: write its module name, {where[:-3].replace('/', '.')}:{attribute}")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(where)
    except (Exception, SystemExit) as error:  # importing a script may end the process
        reason = _one_line(error)
        advice = install_advice(error, where)
        own = isinstance(error, ModuleNotFoundError)
        hint = f": {advice}" if advice else " (is it installed, or are you in its folder?)" if own else ""
        raise UserError(f"cannot import {where}: {type(error).__name__}: {reason}{hint}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            inside = vars(found) if hasattr(found, "__dict__") else {}
            public = [name for name, thing in inside.items() if callable(thing) and not name.startswith("_")]
            raise UserError(f"{where} has no '{part}': {did_you_mean(part, public)}")
        found = getattr(found, part)
    if not callable(found):
        raise UserError(f"{spec} is not callable but {found!r:.40}: name what builds a torch module")
    resolved: Callable[..., Any] = found
    return resolved


_PACKAGES = {"sklearn": "scikit-learn", "cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml", "skimage":
             "scikit-image", "open_clip": "open-clip-torch", "Bio": "biopython", "attr": "attrs",
             "ruamel": "ruamel.yaml", "pkg_resources": "setuptools"}  # fmt: skip
"""Names of modules -> names of their packages, where they differ."""


def install_advice(error: BaseException, own: str = "") -> str:
    """Return the installation advice for an error caused by a missing package, or "". `own`: the user's module."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ImportError):
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return ""
    module = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
    if not module:
        return "install or renew the package that this names"
    package = _PACKAGES.get(module, module.replace("_", "-"))
    return "" if module == own.partition(".")[0] else f"pip install {package}"


def _one_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


# -- decoders that transformers builds ---------------------------------------------------------------------------------

MAX_MODULES = 1000  # layers, and experts of a layer: each is built as Python objects, in milliseconds
_COUNT = re.compile(r"(?:^|_)(?:n|num)_(?:\w+_)?(?:layers?|experts|blocks)$")


def causal_decoder(file: Path) -> tuple[Callable[[], Any], int | None]:
    """Return a function that builds the fp32 module of a `config.json` (or its directory), and its longest sequence.

    UserError if transformers is missing, does not know the type, or has no causal decoder of that type.
    """
    try:
        import transformers
    except ImportError:
        raise UserError("its type is built by transformers: pip install 'ironlaw[hf]'") from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        fields = json.loads((file / "config.json" if file.is_dir() else file).read_text(encoding="utf-8-sig"))
        for key, value in (fields | fields.get("text_config", {})).items():  # before transformers lists the layers
            if _COUNT.search(key) and isinstance(value, int) and value > MAX_MODULES:
                raise ValueError(f"{key} = {value:,}, and a model that is traced has at most {MAX_MODULES:,} of them")
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise UserError(f"transformers {transformers.__version__} cannot read it: {_one_line(error)}") from error
    kind = config.model_type
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise UserError(f"transformers {transformers.__version__} has no causal decoder of type '{kind}'")
    config.use_cache = False

    def build() -> Any:
        import torch

        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    build.__name__ = str(kind)
    return build, getattr(config.get_text_config(), "max_position_embeddings", None)
