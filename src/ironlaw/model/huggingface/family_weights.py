"""Names and forms of the tensors of more families in Hugging Face safetensors.

Beside names, families differ in form: query, key and value (or gate and up) may be one matrix, with the three of a head
or of a group of heads next to each other; rotary positions may turn neighbours instead of halves, which is an order of
rows; norms may multiply by one and their weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ironlaw.model.config import ModelConfig
from ironlaw.model.huggingface.entry import Entry


@dataclass(frozen=True)
class Names:
    """Of one family. Names of a block's parts follow `layers` and the number of the layer."""

    embedding: str = "model.embed_tokens"
    layers: str = "model.layers"
    final_norm: str = "model.norm"
    head: str = "lm_head"
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")  # in the order of `_norms`
    query_key_value: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    positions: str = ""
    embedding_norm: str = ""
    by_head: bool = False  # the fused matrix has query, key and value of each group of heads next to each other
    neighbours: bool = False  # rotary positions turn neighbours
    plus_one: bool = False  # norms multiply by one and their weight


_GEMMA2_NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
)  # fmt: skip
_OLMO2 = Names(norms=("post_attention_layernorm", "post_feedforward_layernorm"))
_FUSED = "mlp.gate_up_proj"
_FALCON = Names(
    "transformer.word_embeddings", "transformer.h", "transformer.ln_f",
    query_key_value=("self_attention.query_key_value",), out="self_attention.dense", up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h", by_head=True, embedding_norm="transformer.word_embeddings_layernorm",
)  # fmt: skip
_COHERE = Names(norms=("input_layernorm",), neighbours=True)

NAMES: dict[str, Names] = {
    **dict.fromkeys(("gpt_oss", "llama", "qwen2", "qwen3", "granite", "olmo", "smollm3", "stablelm"), Names()),
    "gemma": Names(plus_one=True),
    "gemma2": Names(norms=_GEMMA2_NORMS, plus_one=True),
    "gemma3_text": Names(norms=_GEMMA2_NORMS, plus_one=True),
    "phi": Names(final_norm="model.final_layernorm", norms=("input_layernorm",), out="self_attn.dense", up="mlp.fc1",
                 down="mlp.fc2"),
    "phi3": Names(query_key_value=("self_attn.qkv_proj",), gate=_FUSED, up=_FUSED),
    "gpt_neox": Names("gpt_neox.embed_in", "gpt_neox.layers", "gpt_neox.final_layer_norm", "embed_out",
                      query_key_value=("attention.query_key_value",), out="attention.dense", up="mlp.dense_h_to_4h",
                      down="mlp.dense_4h_to_h", by_head=True),
    "gptj": Names("transformer.wte", "transformer.h", "transformer.ln_f", norms=("ln_1",),
                  query_key_value=("attn.q_proj", "attn.k_proj", "attn.v_proj"), out="attn.out_proj", up="mlp.fc_in",
                  down="mlp.fc_out", neighbours=True),
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "starcoder2": Names(up="mlp.c_fc", down="mlp.c_proj"),
    "falcon": _FALCON,
    "bloom": _FALCON,
    "opt": Names("model.decoder.embed_tokens", "model.decoder.layers", "model.decoder.final_layer_norm",
                 norms=("self_attn_layer_norm", "final_layer_norm"), out="self_attn.out_proj", up="fc1", down="fc2",
                 positions="model.decoder.embed_positions"),
    "mpt": Names("transformer.wte", "transformer.blocks", "transformer.norm_f", norms=("norm_1", "norm_2"),
                 query_key_value=("attn.Wqkv",), out="attn.out_proj", up="ffn.up_proj", down="ffn.down_proj"),
    "cohere": _COHERE,
    "cohere2": _COHERE,
    "nemotron": Names(plus_one=True),
    "glm": Names(gate=_FUSED, up=_FUSED, neighbours=True),
    "glm4": Names(norms=("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm",
                         "post_mlp_layernorm"), gate=_FUSED, up=_FUSED, neighbours=True),
}  # fmt: skip


def family_entries(config: ModelConfig, kind: str) -> Iterator[Entry]:
    """Every tensor of the model, with its names here and there."""
    names = NAMES[kind]
    yield Entry("embedding.weight", (f"{names.embedding}.weight",))
    if config.positions == "learned":  # after two rows that nothing reads
        yield Entry("positions.weight", (f"{names.positions}.weight",), order=tuple(range(2, config.context + 2)),
                    rows=config.context + 2)  # fmt: skip
    if config.embedding_norm:
        yield from _norm(config, "embedding_norm", names.embedding_norm, names)
    for layer in range(config.layers):
        yield from _block(config, kind, f"blocks.{layer}", f"{names.layers}.{layer}")
    yield from _norm(config, "final_norm", names.final_norm, names)
    if not config.tied:
        yield Entry("head.weight", (f"{names.head}.weight",))
    if config.head_bias:
        yield Entry("head.bias", (f"{names.head}.bias",))


def _block(config: ModelConfig, kind: str, ours: str, theirs: str) -> Iterator[Entry]:
    names = NAMES[kind]
    there = names.norms
    if kind == "falcon" and config.parallel_norms == 2:
        there = ("ln_attn", "ln_mlp")
    for norm, name in zip(_norms(config), there, strict=False):
        yield from _norm(config, f"{ours}.{norm}", f"{theirs}.{name}", names)
    fused = tuple(f"{theirs}.{name}" for name in names.query_key_value)
    sizes = (config.query_size, config.key_value_size, config.key_value_size)
    yield from _linear(f"{ours}.attention.qkv", fused, config.has_qkv_bias, _order(config, names), sizes=sizes)
    if config.qk_norm:
        for which, part in (("query", "q"), ("key", "k")):
            there_name = f"{theirs}.self_attn.{part}_norm.weight"
            yield Entry(f"{ours}.attention.{which}_norm.weight", (there_name,), plus=float(names.plus_one))
    yield from _linear(f"{ours}.attention.out", (f"{theirs}.{names.out}",), config.has_out_bias)
    if config.attention_sinks:
        yield Entry(f"{ours}.attention.sinks", (f"{theirs}.self_attn.sinks",))
    if config.moe is not None:
        yield from _experts(f"{ours}.ffn", f"{theirs}.mlp")
        return
    both = config.gated_ffn and names.gate == names.up
    width = config.ffn_size
    for which, start in (("gate", 0), ("up", width)) if config.gated_ffn else (("up", 0),):
        rows = tuple(range(start, start + width)) if both else ()
        name = f"{theirs}.{getattr(names, which)}"
        yield from _linear(f"{ours}.ffn.{which}", (name,), config.has_ffn_bias, rows, 2 * width if both else 0)
    yield from _linear(f"{ours}.ffn.down", (f"{theirs}.{names.down}",), config.has_ffn_bias)


def _experts(ours: str, theirs: str) -> Iterator[Entry]:
    """gpt-oss: stacks with inputs first, gate and up taking turns."""
    yield Entry(f"{ours}.router.weight", (f"{theirs}.router.weight",))
    yield Entry(f"{ours}.router.score_bias", (f"{theirs}.router.bias",))
    for which, name, every in (("gate", "gate_up", (0, 2)), ("up", "gate_up", (1, 2)), ("down", "down", (0, 1))):
        yield Entry(f"{ours}.experts.{which}.weight", (f"{theirs}.experts.{name}_proj",), every=every)
        yield Entry(f"{ours}.experts.{which}.bias", (f"{theirs}.experts.{name}_proj_bias",), every=every)


def _norms(config: ModelConfig) -> list[str]:
    """A block's norms in the order in which they run."""
    if config.norm_place == "post":
        return ["attention_after", "ffn_after"]
    if config.norm_place == "sandwich":
        return ["attention_norm", "attention_after", "ffn_norm", "ffn_after"]
    return ["attention_norm"] if config.parallel_norms == 1 else ["attention_norm", "ffn_norm"]


def _norm(config: ModelConfig, ours: str, theirs: str, names: Names) -> Iterator[Entry]:
    for part in ("weight", "bias")[: config.norm_tensors]:
        yield Entry(f"{ours}.{part}", (f"{theirs}.{part}",), plus=float(names.plus_one and part == "weight"))


def _linear(
    ours: str, theirs: tuple[str, ...], bias: bool, order: tuple[int, ...] = (), rows: int = 0,
    sizes: tuple[int, ...] = (),
) -> Iterator[Entry]:  # fmt: skip
    for part in ("weight", "bias") if bias else ("weight",):
        there = tuple(f"{name}.{part}" for name in theirs)
        yield Entry(f"{ours}.{part}", there, sizes if len(theirs) > 1 else (), order=order, rows=rows)


def _order(config: ModelConfig, names: Names) -> tuple[int, ...]:
    """Of our rows of query, key and value, which of theirs each one is; empty: the same."""
    size, groups = config.size_of_head, config.key_value_heads
    if names.by_head:  # of a group its queries, then its key, then its value
        queries = config.heads // groups
        starts = [group * (queries + 2) * size for group in range(groups)]
        parts = [(0, queries), (queries, queries + 1), (queries + 1, queries + 2)]
        return tuple(
            start + row for first, last in parts for start in starts for row in range(first * size, last * size)
        )
    if not names.neighbours:
        return ()
    turned = config.size_of_rotary
    halves = (*range(0, turned, 2), *range(1, turned, 2), *range(turned, size))  # of neighbours, the first ones first
    heads = range(0, config.query_size + config.key_value_size, size)
    values = range(config.query_size + config.key_value_size, config.query_size + 2 * config.key_value_size)
    return (*(start + row for start in heads for row in halves), *values)
