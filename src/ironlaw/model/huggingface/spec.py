"""The description of a Hugging Face family: a `Family` reads and writes `config.json`, and names its tensors.

A part of a family maps some keys of `config.json` to some fields of `ModelConfig`, in both directions. Most parts are a
`Key`, with one name on each side; `parts.py` has those with several. Fields in tables of a config have dotted names
(`moe.experts`), as do nested keys (`attn_config.alibi`). Needs no torch.
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
"""Marks a key that a file must have, because the default of `transformers` is never intended."""


class FamilyPart(Protocol):
    @property
    def name(self) -> str: ...  # in a derived family, a part replaces the one with the same name

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        """Return fields of the model; `values` are those of earlier parts. KeyError for a missing required key."""

    def write(self, view: Fields) -> dict[str, Any]:
        """Return keys of `config.json` for `view`, a result of `view_of`."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Key:
    """A part with one field and one key. `default` is that of `transformers` for a missing key."""

    name: str
    theirs: str
    default: Any = REQUIRED
    also: tuple[str, ...] = ()  # synonyms of the key, read if the first is missing, and also written
    beside: tuple[str, ...] = ()  # other keys that must have the same value, and are also written
    read_as: Callable[[Any], Any] = _same
    write_as: Callable[[Any], Any] = _same

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        given = {key: lookup(fields, key, REQUIRED) for key in (self.theirs, *self.also, *self.beside)}
        stated = {key: value for key, value in given.items() if value not in (None, REQUIRED)}
        if len({repr(value) for value in stated.values()}) > 1:
            raise UserError(" and ".join(f"{key} = {value}" for key, value in stated.items()) + " have to be the same")
        found = next((given[key] for key in (self.theirs, *self.also) if given[key] is not REQUIRED), self.default)
        if found is REQUIRED:
            raise KeyError(self.theirs)
        return {self.name: None if found is None else self.read_as(found)}

    def write(self, view: Fields) -> dict[str, Any]:
        value = view[self.name]
        return dict.fromkeys((self.theirs, *self.also, *self.beside), None if value is None else self.write_as(value))


def lookup(fields: Fields, key: str, default: Any = None) -> Any:
    """Return the value of a key, which may be dotted, or `default` if the file does not have it."""
    found: Any = fields
    for part in key.split("."):
        if part not in (found or {}):
            return default
        found = found[part]
    return found


def nested(flat: Fields) -> dict[str, Any]:
    """Convert dotted names to nested tables."""
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
    """Names of the tensors that replace the dense network in layers with experts; `{}` is the number of an expert."""

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj.weight"
    up: str = "mlp.experts.{}.up_proj.weight"
    down: str = "mlp.experts.{}.down_proj.weight"
    inputs_first: tuple[str, ...] = ()  # stacks with inputs first, whose gate and up alternate if they have one name
    merged_experts: bool = False  # the stack's first two dimensions are one
    bias: str = ""  # suffix of the names of a stack's biases
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    choice_extra_dimension: bool = False  # choice_bias has a first dimension of one
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"


@dataclass(frozen=True)
class Names:
    """Names of a family's tensors. Those of a block are prefixed by `layers` and the number of the layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # in order of execution
    two_norms: tuple[str, ...] = ()  # for parallel branches with one norm each
    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    query_norm: str = "self_attn.q_norm"
    key_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"  # if equal to `up`: halves of one matrix
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    positions: str = ""
    positions_skipped: int = 0  # unused first rows of the table of positions
    embedding_norm: str = ""
    experts: ExpertNames = field(default_factory=ExpertNames)
    by_head: bool = False  # the fused qkv matrix is ordered by group of heads
    neighbours: bool = False  # rotary positions rotate neighbouring elements
    plus_one: bool = False  # norms multiply by 1 + weight
    transposed: bool = False  # matrices of the blocks have inputs first


@dataclass(frozen=True)
class Family:
    kind: str  # `model_type`
    architecture: str | None  # class in `transformers`; None: never written
    parts: Mapping[str, FamilyPart]
    has: Mapping[str, Any]  # fixed fields of ModelConfig; a function computes one from the other values
    only: Mapping[str, Any]  # keys that change the arithmetic -> the only supported value
    names: Names = field(default_factory=Names)

    def derive(
        self, kind: str, architecture: str | None, *parts: FamilyPart, has: Fields | None = None,
        only: Fields | None = None, without: tuple[str, ...] = (), names: Names | None = None,
    ) -> Family:  # fmt: skip
        """Return a family that differs in some parts. A field that it `has` replaces the part of that name."""
        kept = {name: part for name, part in self.parts.items() if name not in {*without, *(has or {})}}
        kept |= {part.name: part for part in parts}
        if "rope" in kept:  # last, because it needs head sizes and windows
            kept["rope"] = kept.pop("rope")
        return replace(
            self, kind=kind, architecture=architecture, parts=kept,
            has={**self.has, **(has or {})}, only={**self.only, **(only or {})}, names=names or self.names,
        )  # fmt: skip

    def read(self, fields: Fields, name: str = "custom") -> ModelConfig:
        for key, value in {"is_causal": True, **self.only}.items():
            found = lookup(fields, key, value)
            if found != value and (found or value):
                raise UserError(f"{key} = {found} is not supported: {value} is")
        if "windows" not in self.parts and "sliding_attention" in (fields.get("layer_types") or ()):
            raise UserError("layer_types with sliding_attention is not supported of this family: full_attention is")
        values: dict[str, Any] = {key: value for key, value in self.has.items() if not callable(value)}
        for part in self.parts.values():
            values |= part.read(fields, values)
        values |= {key: value(values) for key, value in self.has.items() if callable(value)} | {"name": name}
        model = ModelConfig(**nested({key: value for key, value in _biases(values).items() if value is not None}))
        size = model.latent.rotary_size if model.latent else model.size_of_head
        standard = {"num_hidden_layers": model.layers, "hidden_size": model.hidden, "num_attention_heads": model.heads}
        for key, value in (standard | {"head_dim": size}).items():  # most families also read these names
            if fields.get(key) not in (None, value):
                raise UserError(f"{key} = {fields[key]} is not supported: {value} is")
        return model

    def write(self, config: ModelConfig) -> dict[str, Any]:
        """Return the model's `config.json`. KeyError if it lacks parts of the family; to verify, `read` the result."""
        view = view_of(config)
        found: dict[str, Any] = {"architectures": [self.architecture], "model_type": self.kind, "use_cache": True}
        found |= self.only
        for part in self.parts.values():
            found |= part.write(view)
        return nested(found)


def _biases(values: dict[str, Any]) -> dict[str, Any]:
    """Express biases by `bias` and the fields that differ from it."""
    if "ffn_bias" not in values and "qkv_bias" not in values and "out_bias" not in values:
        return values
    whole = values.get("ffn_bias")
    whole = bool(values.get("bias")) if whole is None else whole
    rest = {name: values[name] for name in ("qkv_bias", "out_bias") if values.get(name) not in (None, whole)}
    return {k: v for k, v in values.items() if not k.endswith("_bias") or k in _OTHERS} | rest | {"bias": whole}


_OTHERS = ("norm_bias", "head_bias")


def view_of(config: ModelConfig) -> dict[str, Any]:
    """Return all fields with defaults resolved; those of `moe` and `latent` have dotted names."""
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
            "shared_experts": config.shared_ffn_size // config.expert_ffn_size,  # of equal width
            "balance_loss": config.moe.balance_loss if config.moe.balance == "loss" else 0.0,
        }  # fmt: skip
        view |= {f"moe.{name}": value for name, value in moe.items()}
    if config.latent is not None:
        view |= {f"latent.{name}": value for name, value in config.latent.model_dump().items()}
    return view


def arithmetic(config: ModelConfig) -> dict[str, Any]:
    """Return a description of a model's computation, equal for all equivalent configs."""
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
    """Return the names of the entries in which the computations of two models differ."""
    mine, theirs = arithmetic(one), arithmetic(other)
    return [name for name in mine | theirs if not _equal(mine.get(name), theirs.get(name))]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=1e-9)
    return bool(one == other)
