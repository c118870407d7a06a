"""A decoder that transformers can build from its `config.json`, for tracing: recurrent, hybrid and other kinds that
Ironlaw's own decoder is not.

No code of the checkpoint's is run, and no weights are read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ironlaw.errors import UserError


def causal_decoder(file: Path) -> tuple[Callable[[], Any], int | None]:
    """What builds the module of a `config.json` (or its directory), in fp32, and the longest sequence it states.

    UserError where transformers is missing, does not know the type, or has no causal decoder of it.
    """
    try:
        import transformers
    except ImportError:
        raise UserError("its type is built by transformers: pip install 'ironlaw[hf]'") from None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"transformers {transformers.__version__} cannot read it: {first}") from error
    kind = config.model_type
    if type(config) not in transformers.AutoModelForCausalLM._model_mapping:
        raise UserError(f"transformers {transformers.__version__} has no causal decoder of type '{kind}'")
    config.use_cache = False

    def build() -> Any:
        import torch

        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)

    build.__name__ = str(kind)
    return build, getattr(config.get_text_config(), "max_position_embeddings", None)
