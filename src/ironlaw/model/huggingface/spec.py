"""How a Hugging Face family is described: one `Family` reads `config.json`, writes it, and names its tensors.

A part of a family maps some keys of `config.json` to some fields of `ModelConfig`, in both directions. Most parts are a
`Key`, one name on either side; those of more are in `parts.py`. Fields of the tables of a config have dotted names
(`moe.experts`), and so have nested keys (`attn_config.alibi`). Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from ironlaw.errors import UserError
from ironlaw.model.config import ModelConfig

Fields = Mapping[str, Any]
REQUIRED: Any = object()
"""As a default: a file must have the key, since nobody means what `transformers` would take."""


class FamilyPart(Protocol):
    @property
    def name(self) -> str: ...  # a part replaces the one that has its name in the family that it is derived from

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        """Fields of the model; `values` are those of earlier parts. KeyError: of a key that must be there."""

    def write(self, view: Fields) -> dict[str, Any]:
        """Keys of `config.json`; `view` as in `view_of`."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Key:
    """One field under one name. `default` is what `transformers` takes where a file leaves the key out."""

    name: str
    theirs: str
    default: Any = REQUIRED
    also: tuple[str, ...] = ()  # other names of it, which are read where the first is missing, and written too
    beside: tuple[str, ...] = ()  # other keys that are written with the same value, and may not have another
    read_as: Callable[[Any], Any] = _same
    write_as: Callable[[Any], Any] = _same

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        given = {key: get(fields, key) for key in (self.theirs, *self.also, *self.beside) if has(fields, key)}
        stated = {key: value for key, value in given.items() if value is not None}
        if len({repr(value) for value in stated.values()}) > 1:
            raise UserError(" and ".join(f"{key} = {value}" for key, value in stated.items()) + " have to be the same")
        found = next((given[key] for key in (self.theirs, *self.also) if key in given), self.default)
        if found is REQUIRED:
            raise KeyError(self.theirs)
        return {self.name: None if found is None else self.read_as(found)}

    def write(self, view: Fields) -> dict[str, Any]:
        value = view[self.name]
        return dict.fromkeys((self.theirs, *self.also, *self.beside), None if value is None else self.write_as(value))


def has(fields: Fields, key: str) -> bool:
    table, _, rest = key.partition(".")
    return has(fields.get(table) or {}, rest) if rest else table in fields


def get(fields: Fields, key: str) -> Any:
    table, _, rest = key.partition(".")
    return get(fields[table], rest) if rest else fields[table]


def nested(flat: Fields) -> dict[str, Any]:
    """Dotted names as tables."""
    found: dict[str, Any] = {}
    tables: dict[str, dict[str, Any]] = {}
    for name, value in flat.items():
        table, _, rest = name.partition(".")
        if rest:
            tables.setdefault(table, {})[rest] = value
        else:
            found[name] = value
    return found | {table: nested(values) for table, values in tables.items()}


@dataclass(frozen=True)
class ExpertNames:
    """Of what a layer with experts has in place of the dense network; `{}` is the number of an expert."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    inputs_first: tuple[str, ...] = ()  # of matrices in one stack; gate and up of one name are halves, or take turns
    flat: bool = False  # the stack's rows are one dimension
    bias: str = ""  # what a stack's biases add to its name
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    choice_row: bool = False  # which is one row
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True)
class Names:
    """Of the tensors of a family. Names of a block's parts follow `layers` and the number of the layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # in the order in which they run
    two_norms: tuple[str, ...] = ()  # of branches side by side, each with a norm of its own
    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"  # the same as `up`: halves of one matrix
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    positions: str = ""
    positions_skipped: int = 0  # first rows of that table, which nothing reads
    embedding_norm: str = ""
    experts: ExpertNames = field(default_factory=ExpertNames)
    by_head: bool = False  # the fused matrix has query, key and value of each group of heads next to each other
    neighbours: bool = False  # rotary positions turn neighbours
    plus_one: bool = False  # norms multiply by one and their weight
    transposed: bool = False  # matrices of the blocks have inputs first


@dataclass(frozen=True)
class Family:
    kind: str  # `model_type`
    architecture: str | None  # its class in `transformers`; None: read, and never written
    parts: Mapping[str, FamilyPart]
    has: Mapping[str, Any]  # fields of ModelConfig that all of the family have; a function is given the other values
    only: Mapping[str, Any]  # keys that change the arithmetic, and the one value of each that ModelConfig can say
    names: Names = field(default_factory=Names)

    def derive(
        self, kind: str, architecture: str | None, *parts: FamilyPart, has: Fields | None = None,
        only: Fields | None = None, without: tuple[str, ...] = (), names: Names | None = None,
    ) -> Family:  # fmt: skip
        """A family that differs in some parts."""
        kept = {name: part for name, part in self.parts.items() if name not in without}
        kept |= {part.name: part for part in parts}
        if "rope" in kept:  # last, because it asks for head sizes and windows
            kept["rope"] = kept.pop("rope")
        return replace(
            self, kind=kind, architecture=architecture, parts=kept,
            has={**self.has, **(has or {})}, only={**self.only, **(only or {})}, names=names or self.names,
        )  # fmt: skip

    def read(self, fields: Fields, name: str = "custom") -> ModelConfig:
        for key, value in {"is_causal": True, **self.only}.items():
            found = get(fields, key) if has(fields, key) else value
            if found != value and (found or value):
                raise UserError(f"{key} = {found} is not supported: {value} is")
        if "windows" not in self.parts and "sliding_attention" in (fields.get("layer_types") or ()):
            raise UserError("layer_types with sliding_attention is not supported of this family: full_attention is")
        values: dict[str, Any] = {key: value for key, value in self.has.items() if not callable(value)}
        for part in self.parts.values():
            values |= part.read(fields, values)
        values |= {key: value(values) for key, value in self.has.items() if callable(value)} | {"name": name}
        model = ModelConfig(**nested({key: value for key, value in _biases(values).items() if value is not None}))
        for key, value in _standard(model).items():  # which most families read under these names, too
            if fields.get(key) not in (None, value):
                raise UserError(f"{key} = {fields[key]} is not supported: {value} is")
        return model

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """KeyError for a model without the parts of the family. Read it again to know that it is the same model."""
        view = view_of(config)
        found: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.kind, "use_cache": True}
        found |= self.only
        for part in self.parts.values():
            found |= part.write(view)
        return nested(found)


def _standard(model: ModelConfig) -> dict[str, int]:
    size = model.latent.rotary_size if model.latent else model.size_of_head
    return {"num_hidden_layers": model.layers, "hidden_size": model.hidden, "num_attention_heads": model.heads,
            "head_dim": size}  # fmt: skip


def _biases(values: dict[str, Any]) -> dict[str, Any]:
    """`bias` for all, and the others where they differ."""
    if "ffn_bias" not in values and "qkv_bias" not in values and "out_bias" not in values:
        return values
    whole = values.get("ffn_bias")
    whole = bool(values.get("bias")) if whole is None else whole
    rest = {name: values[name] for name in ("qkv_bias", "out_bias") if values.get(name) not in (None, whole)}
    return {k: v for k, v in values.items() if not k.endswith("_bias") or k in _OTHERS} | rest | {"bias": whole}


_OTHERS = ("norm_bias", "head_bias")


def view_of(config: ModelConfig) -> dict[str, Any]:
    """Fields with what holds where they are not given; those of `moe` and `latent` under dotted names."""
    view = config.model_dump(exclude={"moe", "latent"}) | {
        "kv_heads": config.key_value_heads, "head_size": config.size_of_head, "ffn": config.ffn_size,
        "qkv_bias": config.has_qkv_bias, "out_bias": config.has_out_bias, "ffn_bias": config.has_ffn_bias,
        "rotary_size": config.size_of_rotary,
        "attention_scale": config.attention_scale or 1 / math.sqrt(config.size_of_head),
        "windowed": [config.is_windowed(layer) for layer in range(config.layers)],
        "rotated": [config.is_rotated(layer) for layer in range(config.layers)],
    }  # fmt: skip
    if config.moe is not None:
        moe = config.moe.model_dump() | {
            "expert_ffn": config.expert_ffn_size, "shared_ffn": config.shared_ffn_size,
            "shared_experts": config.shared_ffn_size // config.expert_ffn_size,  # each as wide as the others
            "balance_loss": config.moe.balance_loss if config.moe.balance == "loss" else 0.0,
        }  # fmt: skip
        view |= {f"moe.{name}": value for name, value in moe.items()}
    if config.latent is not None:
        view |= {f"latent.{name}": value for name, value in config.latent.model_dump().items()}
    return view


def arithmetic(config: ModelConfig) -> dict[str, Any]:
    """What a model computes, however its fields say it."""
    rotary, latent = config.positions == "rope", config.latent is not None
    view = {key: value for key, value in view_of(config).items() if not key.startswith("moe.")}
    placed = {"name", "dropout", "bias", "full_every", "full_offset", "full_first", "unrotated_every"}
    placed |= set() if rotary else {"rope_theta", "rope_scaling", "rotary_size", "rotated", "rope_theta_local"}
    placed |= {"kv_heads", "head_size", "attention_scale"} if latent else set()
    found = {key: value for key, value in view.items() if key not in placed}
    if latent:
        found["attention_scale"] = config.attention_scale
    windowed = view["windowed"]
    found["sliding_window"] = config.sliding_window if any(windowed) else None
    if rotary and any(windowed):
        local = config.rope_theta_local
        found["rope_theta_local"] = (local or config.rope_theta, None if local else config.rope_scaling)
    else:
        found["rope_theta_local"] = None
    moe = config.moe
    if moe is not None:
        layers = [moe.in_layer(layer) for layer in range(config.layers)]
        limited = (moe.groups, moe.groups_per_token) if moe.limits_groups else None
        names = ("experts", "experts_per_token", "shared_gate", "bias", "score", "normalize", "routed_scale")
        found |= {f"moe.{name}": getattr(moe, name) for name in names}
        found |= {"moe.layers": layers, "moe.groups": limited, "moe.choice_bias": moe.balance == "bias"}
        found |= {"moe.expert_ffn": config.expert_ffn_size, "moe.shared_ffn": config.shared_ffn_size}
        if all(layers):
            del found["ffn"]
            found.pop("ffn_bias")
    return found


def differences(one: ModelConfig, other: ModelConfig) -> list[str]:
    """Names of what two models compute differently."""
    mine, theirs = arithmetic(one), arithmetic(other)
    return [name for name in mine | theirs if not _equal(mine.get(name), theirs.get(name))]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)
