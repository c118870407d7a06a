"""Parts of Hugging Face families that are encoded by several keys of `config.json`: each reads and writes them.

Rotary positions are top-level keys in files of `transformers` 4, and a table `rope_parameters` in version 5. Both are
read, and both are written. Needs no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ironlaw.errors import UserError, did_you_mean
from ironlaw.model.huggingface.spec import Fields, lookup
from ironlaw.model.yarn import is_yarn

ACTIVATIONS = {
    "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "silu": "silu", "swish": "silu", "relu": "relu", "relu2": "relu2",
}  # fmt: skip
"""Names of activations in `config.json` -> Ironlaw's names; of several, the first is written."""


@dataclass(frozen=True)
class Activation:
    default: str = "silu"
    key: str = "hidden_act"
    also: tuple[str, ...] = ()
    legacy: Mapping[str, str] | None = None  # names with another meaning in this family
    name = "activation"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        names = [fields[key] for key in (*self.also, self.key) if fields.get(key)]
        named = (self.legacy or {}).get(names[0] if names else self.default, names[0] if names else self.default)
        if named not in ACTIVATIONS:
            raise UserError(f"{self.key} = '{named}' is not supported: {did_you_mean(str(named), ACTIVATIONS)}")
        return {"activation": ACTIVATIONS[named]}

    def write(self, view: Fields) -> dict[str, Any]:
        written = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
        return dict.fromkeys((self.key, *self.also), written[view["activation"]])


@dataclass(frozen=True)
class Rope:
    """Rotary positions: base, scaling, and the rotated share of a head."""

    theta: float | None = 10_000.0  # default base; None: required, as versions of `transformers` differ
    theta_key: str = "rope_theta"
    share: float | None = None  # default rotated share of a head; None: the family always rotates all of it
    share_key: str = "partial_rotary_factor"
    count_key: str | None = None  # key of older files for the number of rotated elements
    scaling: Mapping[str, Any] | None = None  # default scaling table
    local_key: str | None = None  # key of the base of layers with a window, which have no scaling
    local_theta: float | None = None
    by_kind: bool = False  # the table has one table for each kind of layer
    only_longrope: bool = False  # whether other scalings are errors in `transformers`
    name = "rope"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        newer: Fields = fields.get("rope_parameters") or {}
        if "full_attention" in newer and not self.by_kind:
            raise UserError("rope_parameters with a table of each kind of layer is not supported here: write one table")
        older: Fields = fields.get("rope_scaling") or {}
        # `transformers` prefers the older table; with tables by kind of layer, it updates the newer one.
        table = {**(newer.get("full_attention", newer) if self.by_kind or not older else {}), **older}
        if self.by_kind:
            _check_kinds(newer, table)
        if self.scaling and fields.get("rope_parameters") is None and not older:
            if "rope_scaling" in fields:  # version 4 takes none, version 5 the family's default
                raise UserError(f"rope_scaling = {fields['rope_scaling']} is read in two ways, by version of "
                                "transformers: leave it out, or write the table")  # fmt: skip
            table = dict(self.scaling)
        theta = table.get("rope_theta") or lookup(fields, self.theta_key) or self.theta
        if theta is None:
            raise KeyError(self.theta_key)
        if "rope_theta" not in table:
            _check_same(fields, "rope_theta", theta, self.theta_key)
        scaling = read_scaling(table, fields)
        found = {"positions": "rope", "rope_theta": float(theta), "rope_scaling": scaling}
        if self.only_longrope and scaling and table.get("short_factor") is None:
            raise UserError("rope_scaling is not supported of this family: type 'longrope' is")
        if table.get("short_factor") is not None:
            found |= {"rope_short": tuple(table["short_factor"]), "rope_long": tuple(table["long_factor"])}
        found |= {"rotary_size": self._rotary_size(table, fields, values)}
        if self.by_kind and values.get("sliding_window") is not None:
            local = (newer.get("sliding_attention") or {}).get("rope_theta")
            if local is None and self.local_key is None and self.local_theta not in (None, theta):
                raise UserError(f"rope_theta = {theta} is read in two ways for layers with a window, by version of "
                                "transformers: write rope_parameters with a table of either kind")  # fmt: skip
            local = local or fields.get(self.local_key or "") or self.local_theta or theta
            found["rope_theta_local"] = float(local) if scaling or float(local) != float(theta) else None
        return found

    def _rotary_size(self, table: Fields, fields: Fields, values: Fields) -> int | None:
        given = (table.get("partial_rotary_factor"), fields.get(self.share_key), self.share, 1.0)
        share = next(share for share in given if share is not None)
        if "partial_rotary_factor" not in table and self.share_key not in fields:
            _check_same(fields, "partial_rotary_factor", share, self.share_key)
        if self.share is None and share != 1.0:
            raise UserError(f"partial_rotary_factor = {share} is not supported: the family turns whole heads")
        size = values.get("head_size") or values["hidden"] // values["heads"]
        if self.count_key and self.count_key in fields and not ({"partial_rotary_factor"} & {*table, *fields}):
            share = fields[self.count_key] / size
        if self.share_key in fields and fields[self.share_key] is None and self.share:
            raise UserError(f"{self.share_key} = None is not supported: give a number, or leave it out")
        if not int(size * share):
            raise UserError(f"{self.share_key} = {share} is not supported: it leaves no position")
        return None if int(size * share) == size else int(size * share)

    def write(self, view: Fields) -> dict[str, Any]:
        scaling, theta = written_scaling(view), view["rope_theta"]
        table = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
        found: dict[str, Any] = {"rope_theta": theta, self.theta_key: theta, "rope_scaling": scaling}
        if scaling and scaling["rope_type"] == "longrope" and self._factor_follows_context(view):
            # Version 4 requires exactly these three keys in its table.
            names = ("short_factor", "long_factor")
            found["rope_scaling"] = {"type": "longrope"} | {name: scaling[name] for name in names}
        if self.scaling is not None and scaling is None:  # otherwise the family's default would apply
            found["rope_scaling"] = {"rope_type": "default"}
        if self.share is not None:
            share = view["rotary_size"] / view["head_size"]
            if int(view["head_size"] * share) < view["rotary_size"]:
                share = math.nextafter(share, 2.0)
            table["partial_rotary_factor"] = share
            found |= {"partial_rotary_factor": share, self.share_key: share}
            found |= {self.count_key: view["rotary_size"]} if self.count_key else {}
        if self.by_kind:
            local = view["rope_theta_local"] or theta
            found["rope_parameters"] = {
                "full_attention": table, "sliding_attention": {"rope_type": "default", "rope_theta": local}
            }  # fmt: skip
            return found | ({self.local_key: local} if self.local_key else {})
        if "original_max_position_embeddings" in table:
            found["original_max_position_embeddings"] = table["original_max_position_embeddings"]
        return found | {"rope_parameters": table}

    @staticmethod
    def _factor_follows_context(view: Fields) -> bool:
        """Whether LongRoPE's factor equals the ratio of the two context lengths."""
        scaling = view["rope_scaling"]
        return "attention_factor" not in scaling and scaling["factor"] == view["context"] / scaling["original_context"]


def _check_kinds(newer: Fields, table: Fields) -> None:
    """UserError for settings that `transformers` reads differently if each kind of layer has a table."""
    local = newer.get("sliding_attention") or {}
    kind = local.get("rope_type") or local.get("type") or "default"
    if kind != "default":
        raise UserError(f"rope_type = '{kind}' of sliding_attention is not supported: default is")
    if newer and "full_attention" not in newer:
        raise UserError("rope_parameters needs a table for full_attention and one for sliding_attention")
    if table.get("type") not in (None, table.get("rope_type", "default")):
        raise UserError(f"rope_scaling's type = '{table['type']}' is not read by transformers here: write rope_type")


def _check_same(fields: Fields, key: str, value: float, own: str) -> None:
    if fields.get(key) is not None and float(fields[key]) != float(value):
        raise UserError(f"{key} = {fields[key]} stands where transformers reads {own} (here {value}): write that key")


def read_scaling(table: Fields, fields: Fields) -> dict[str, float] | None:
    """Convert the rotary table of a file to ModelConfig's `rope_scaling`."""
    kind = table.get("rope_type") or table.get("type") or "default"
    if kind == "default":
        return None
    if kind == "linear":
        return {"factor": float(table["factor"])}
    if kind not in ("llama3", "yarn", "longrope", "su"):
        raise UserError(f"rope_scaling of type '{kind}' is not supported: linear, llama3, yarn and longrope are")
    # For LongRoPE the key outside the table applies, or the family's default.
    there = fields if kind in ("longrope", "su") else table
    original = float(there["original_max_position_embeddings"])
    if there is table:  # version 5 of `transformers` prefers the key outside the table, version 4 does not read it
        _check_same(fields, "original_max_position_embeddings", original, "rope_scaling's")
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        return {name: float(table[name]) for name in names} | {"original_context": original}
    found = {"factor": float(table.get("factor") or fields["max_position_embeddings"] / original)}
    extra = ["attention_factor"]
    if kind == "yarn":
        found |= {"beta_fast": float(table.get("beta_fast") or 32), "beta_slow": float(table.get("beta_slow") or 1)}
        found |= {} if table.get("truncate", True) else {"truncate": 0.0}
        extra += ["mscale", "mscale_all_dim"]
    given = {name: float(table[name]) for name in extra if table.get(name) is not None}
    return found | {"original_context": original} | given


def written_scaling(view: Fields) -> dict[str, Any] | None:
    if view["rope_scaling"] is None:
        return None
    scaling = dict(view["rope_scaling"])
    if set(scaling) == {"factor"}:
        return {"rope_type": "linear", **scaling}
    scaling["original_max_position_embeddings"] = int(scaling.pop("original_context"))
    if view["rope_short"] and view["rope_long"]:
        factors = {"short_factor": list(view["rope_short"]), "long_factor": list(view["rope_long"])}
        return {"rope_type": "longrope", **factors, **scaling}
    if is_yarn(scaling):
        return {"rope_type": "yarn", **scaling} | ({} if scaling.get("truncate", 1.0) else {"truncate": False})
    return {"rope_type": "llama3", **scaling}


@dataclass(frozen=True)
class Windows:
    """The sliding window, and the layers that have it."""

    size: int | None = None  # default window
    kinds: bool = False  # files may list the kind of every layer
    every: int | None = None  # without such a list, every n-th layer attends to all tokens; None: no layer does
    every_key: str | None = None
    first_key: str | None = None  # key of the first layer with the window (Qwen2); default: 28
    switch: str | None = None  # key that enables windows
    turned: str = "all"  # layers with rotary positions; "windowed or all": all if no layer has a window
    name = "windows"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        window = fields.get("sliding_window", self.size)
        off = window is None or (self.switch and not fields.get(self.switch))
        placed = None if off else self._placed(fields, values["layers"])
        found = {} if placed is None else {"sliding_window": window, **placed}
        if self.turned == "all" or (window is None and self.turned != "windowed"):
            return found
        if not found or found.get("full_first") or found.get("full_offset"):
            raise UserError("layer_types is not supported: layers without positions are every n-th")
        return found | {"unrotated_every": found.get("full_every")}

    def _placed(self, fields: Fields, layers: int) -> dict[str, Any] | None:
        """Return ModelConfig's fields for the layers with full attention; None if all layers have it."""
        kinds = fields.get("layer_types")
        if kinds is not None and (self.kinds or "full_attention" in kinds):
            if not self.kinds:
                raise UserError("layer_types is not supported: all layers of the family have the window")
            return _full_attention_places([kind == "full_attention" for kind in kinds][:layers])
        if self.first_key:
            first = fields.get(self.first_key, 28)
            return {"full_first": first} if first < layers else None
        every = fields.get(self.every_key or "") or self.every
        return {} if every is None else {"full_every": every}

    def write(self, view: Fields) -> dict[str, Any]:
        windowed, window = view["windowed"], view["sliding_window"] if any(view["windowed"]) else None
        # Version 4 requires a window even if no layer uses it.
        unused = self.size if self.kinds and not self.switch and self.turned == "all" else None
        found: dict[str, Any] = {"sliding_window": window or unused}
        if self.kinds:
            found["layer_types"] = ["sliding_attention" if each else "full_attention" for each in windowed]
        if self.every_key and view["full_every"] and not view["full_offset"]:
            found[self.every_key] = view["full_every"]
        if self.first_key:
            found[self.first_key] = view["full_first"] if window else view["layers"]
        return found | ({self.switch: window is not None} if self.switch else {})


def _full_attention_places(full: list[bool]) -> dict[str, Any] | None:
    layers = len(full)
    if all(full):
        return None
    first, steps = full.count(True), range(2, layers + 1)
    regular = [(every, 0) for every in steps]
    shifted = [(every, offset) for every in steps for offset in range(1, every)]
    for every, offset in [*regular, (0, 0), *shifted]:
        if not every and full == [layer < first for layer in range(layers)]:
            return {"full_first": first}
        if every and full == [(layer + 1 + offset) % every == 0 for layer in range(layers)]:
            return {"full_every": every, "full_offset": offset}
    raise UserError("layer_types is not supported: full attention is in the first layers, or in every n-th")


@dataclass(frozen=True)
class Alternating:
    """GPT-Neo's `attention_types`: [[["global", "local"], 12]] are 24 alternating layers."""

    name = "windows"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        types = fields.get("attention_types") or [[["global", "local"], 12]]
        kinds = [kind for group, count in types for kind in group * count]
        if len(kinds) != values["layers"]:
            raise UserError(f"attention_types has {len(kinds)} layers, num_layers is {values['layers']}")
        if fields.get("attention_layers") not in (None, kinds):
            raise UserError("attention_layers is not what attention_types says: make them the same")
        placed = _full_attention_places([kind == "global" for kind in kinds])
        return {} if placed is None else {"sliding_window": fields.get("window_size", 256), **placed}

    def write(self, view: Fields) -> dict[str, Any]:
        kinds = ["local" if windowed else "global" for windowed in view["windowed"]]
        return {"attention_types": [[kinds, 1]], "window_size": view["sliding_window"] or 256}


@dataclass(frozen=True)
class Unrotated:
    """SmolLM3's layers without positions."""

    name = "unrotated"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        every, rotated = fields.get("no_rope_layer_interval", 4), fields.get("no_rope_layers")  # 1: rotated
        if rotated is None or [bool(r) for r in rotated] == [(n + 1) % every != 0 for n in range(values["layers"])]:
            return {"unrotated_every": every}
        if not all(rotated):
            raise UserError("no_rope_layers is not supported: every n-th layer is without positions, or none")
        return {}

    def write(self, view: Fields) -> dict[str, Any]:
        return {
            "no_rope_layers": [int(rotated) for rotated in view["rotated"]],
            "no_rope_layer_interval": view["unrotated_every"] or view["layers"] + 1,
        }


@dataclass(frozen=True)
class LayersBetween:
    """ERNIE's layers with experts: every n-th, from a first one to the last layer."""

    name = "sparse_layers"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        last, top = fields.get("moe_layer_end_index", -1), values["layers"] - 1
        if last not in (-1, top):
            raise UserError(f"moe_layer_end_index = {last} is not supported: the last layer ({top}) is")
        first, every = fields.get("moe_layer_start_index", 1), fields.get("moe_layer_interval", 1)
        return {"moe.dense_layers": first, "moe.every": every}

    def write(self, view: Fields) -> dict[str, Any]:
        first, every = view["moe.dense_layers"], view["moe.every"]
        return {"moe_layer_start_index": first, "moe_layer_end_index": view["layers"] - 1, "moe_layer_interval": every}


@dataclass(frozen=True)
class ExpertGroups:
    """DeepSeek's expert groups. `method`: values of V2's key `topk_method` without and with groups."""

    default: tuple[int | None, int | None] = (None, None)
    method: tuple[str, str] | None = None
    name = "expert_groups"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        method = fields.get("topk_method", "greedy")
        if self.method and method not in self.method:
            raise UserError(f"topk_method = {method} is not supported: {' and '.join(self.method)} are")
        groups = fields.get("n_group", self.default[0]) or 1
        if groups == 1 or (self.method and method == self.method[0]):
            return {}
        return {"moe.groups": groups, "moe.groups_per_token": fields.get("topk_group", self.default[1])}

    def write(self, view: Fields) -> dict[str, Any]:
        groups, seen = view["moe.groups"], view["moe.groups_per_token"] or view["moe.groups"]
        method = {"topk_method": self.method[seen < groups]} if self.method else {}
        return {"n_group": groups, "topk_group": seen} | method


@dataclass(frozen=True)
class FalconHeads:
    """Falcon's heads and norms. 7B: one norm and one key/value head; from 40B: two norms and groups of heads."""

    name = "kv_heads"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        newer, parallel = fields.get("new_decoder_architecture"), fields.get("parallel_attn", True)
        heads, norms = values["heads"], fields.get("num_ln_in_parallel_attn")
        kv_heads = (fields.get("num_kv_heads") or heads) if newer else 1 if fields.get("multi_query", True) else heads
        return {"kv_heads": kv_heads, "parallel_norms": (norms or 2) if newer else 1 if parallel else 0}

    def write(self, view: Fields) -> dict[str, Any]:
        norms, kv_heads = view["parallel_norms"], view["kv_heads"]
        one = kv_heads == 1 and norms == 1
        newer = not one and norms > 0
        return {
            "multi_query": kv_heads == 1 and not newer, "new_decoder_architecture": newer, "parallel_attn": norms > 0,
            "num_kv_heads": kv_heads, "num_ln_in_parallel_attn": norms if newer else None,
        }  # fmt: skip


@dataclass(frozen=True)
class Multiple:
    """A width given as a multiple of the hidden size (MPT)."""

    key: str
    default: int
    name = "ffn"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        return {"ffn": lookup(fields, self.key, self.default) * values["hidden"]}

    def write(self, view: Fields) -> dict[str, Any]:
        return {self.key: view["ffn"] // view["hidden"]}


@dataclass(frozen=True)
class Always:
    """Keys for features that Ironlaw does not have, written with values that disable them."""

    keys: Mapping[str, Any]
    name = "always"

    def read(self, fields: Fields, values: Fields) -> dict[str, Any]:
        return {}

    def write(self, view: Fields) -> dict[str, Any]:
        return dict(self.keys)
