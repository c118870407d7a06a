"""131 modules that other people wrote, each planned by tracing and checked against PyTorch on real tensors.

    pip install --no-deps torchvision timm diffusers torch_geometric        # whatever is missing is skipped and said
    python benchmarks/modules.py --out benchmarks/results/modules.md     # all, about half an hour on two cores
    python benchmarks/modules.py resnet18 GCN --no-check                    # some, traced only

A row: whether the module was answered (traced; or run once on real tensors, because it looks at values), FLOPs of one
forward and backward pass, bytes saved for the backward pass, and the highest moment with AdamW. `check` compares FLOPs
with `torch.utils.flop_counter` on the real module and saved bytes with the storages that autograd holds. The counter is
given formulas for what it counts as nothing or wrongly: attention and grouped products on a CPU, and weight gradients
of grouped convolutions.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import importlib.util
import inspect
import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode, conv_flop_count

from ironlaw import units
from ironlaw.errors import UserError
from ironlaw.plan.memory import peak_memory
from ironlaw.workload.blocks import attention_score_pairs
from ironlaw.workload.module_source import Input
from ironlaw.workload.operations import saved_bytes, total_flops
from ironlaw.workload.program import step_of_trace
from ironlaw.workload.trace import _floating, _tensors, trace
from ironlaw.workload.trace_inputs import arguments, make_tensors, named_inputs
from ironlaw.workload.trace_store import ModuleTrace

IDS, MASK = Input("input_ids", (2, 128), "int64"), Input("attention_mask", (2, 128), "int64")
GRAPH = [Input("x", (200, 32)), Input("edge_index", (2, 1000), "int64")]


@dataclass(frozen=True)
class Case:
    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Any


def image(size: int = 224, name: str = "x", batch: int = 2) -> Input:
    return Input(name, (batch, 3, size, size))


# -- the modules ---------------------------------------------------------------------------------------------------

TIMM = (
    "resnet18 resnetv2_50 regnety_002 efficientnet_b0 mobilenetv3_small_100 mobilenetv4_conv_small convnext_atto "
    "convnextv2_atto vit_tiny_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 beit_base_patch16_224 "
    "eva02_tiny_patch14_224 swin_tiny_patch4_window7_224 swinv2_cr_tiny_224 mixer_s32_224 gmlp_ti16_224 resmlp_12_224 "
    "coat_tiny coatnet_nano_rw_224 maxvit_rmlp_pico_rw_256 poolformer_s12 caformer_s18 xcit_nano_12_p16_224 pit_ti_224 "
    "levit_128s cait_xxs24_224 crossvit_9_240 convit_tiny edgenext_xx_small efficientformer_l1 mobilevit_xxs "
    "mobileone_s0 fastvit_t8 repvit_m0_9 ghostnet_050 hrnet_w18_small densenet121 dla34 dpn68 vgg11 nf_resnet26 "
    "rexnet_100 res2net50_14w_8s sequencer2d_s volo_d1_224 hiera_tiny_224 tiny_vit_5m_224 nest_tiny tnt_s_patch16_224 "
    "visformer_tiny twins_pcpvt_small inception_next_atto focalnet_tiny_srf mambaout_femto"
)
TORCHVISION = (
    "alexnet resnet50 densenet121 googlenet inception_v3 mobilenet_v2 mobilenet_v3_large efficientnet_v2_s "
    "shufflenet_v2_x1_0 squeezenet1_1 mnasnet0_5 regnet_y_400mf convnext_tiny vit_b_32 swin_t maxvit_t "
    "fcn_resnet50 deeplabv3_mobilenet_v3_large lraspp_mobilenet_v3_large r3d_18 swin3d_t raft_small"
)


def timm_cases() -> Iterator[Case]:
    import timm

    for name in TIMM.split():
        size = (timm.get_pretrained_cfg(name, allow_unregistered=True) or timm.models.PretrainedCfg()).input_size[-1]
        yield Case("timm", name, lambda name=name: timm.create_model(name), [image(size)])


def torchvision_cases() -> Iterator[Case]:
    import torchvision

    for name in TORCHVISION.split():
        inputs = [image(299 if name == "inception_v3" else 224)]
        if name in ("r3d_18", "swin3d_t"):
            inputs = [Input("x", (1, 3, 8, 112, 112))]
        if name == "raft_small":
            inputs = [image(128, "image1"), image(128, "image2")]
        yield Case("torchvision", name, lambda name=name: _torchvision(torchvision, name), inputs)


def _torchvision(torchvision: Any, name: str) -> nn.Module:
    backbone = {"weights_backbone": None} if any(part in name for part in ("fcn", "lab", "lraspp")) else {}
    module: nn.Module = torchvision.models.get_model(name, weights=None, **backbone)
    return module


SMALL = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 512,
    "attention_dropout": 0.0,
}  # fmt: skip
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def transformers_cases() -> Iterator[Case]:
    import transformers

    transformers.logging.set_verbosity_error()

    def of(kind: str, auto: str, inputs: list[Input], dtype: torch.dtype | None = None, **options: Any) -> Case:
        def build() -> nn.Module:
            given = transformers.AutoConfig.for_model(kind)
            known = {key: value for key, value in options.items() if hasattr(given, key) or key.endswith("token_id")}
            config = transformers.AutoConfig.for_model(kind, **known)
            config.use_cache = False
            module: nn.Module = getattr(transformers, auto).from_config(config)
            return module.to(dtype) if dtype else module

        return Case("transformers", f"{kind}{', bf16' if dtype else ''}", build, inputs)

    text, grouped = [IDS, MASK], SMALL | {"num_key_value_heads": 2}
    decoder = "AutoModelForCausalLM"
    yield of("gpt2", decoder, text, n_embd=128, n_layer=2, n_head=4, vocab_size=512, attn_pdrop=0.0)
    for kind in ("llama", "qwen3", "olmo2", "gemma2", "smollm3", "mistral", "phi3", "exaone4"):
        yield of(kind, decoder, text, **grouped, head_dim=32, pad_token_id=0, layer_types=None)
    yield of("gemma3_text", decoder, text, **grouped, head_dim=32)
    yield of("opt", decoder, text, **SMALL, word_embed_proj_dim=128, ffn_dim=256, dropout=0.0)
    yield of("mixtral", decoder, text, **grouped, **EXPERTS)
    yield of("qwen3_moe", decoder, text, torch.bfloat16, **grouped, **EXPERTS, head_dim=32)
    yield of("mamba2", decoder, [IDS], **SMALL, num_heads=8, head_dim=32, state_size=16, n_groups=1, chunk_size=64)
    for kind in ("bert", "modernbert", "electra"):
        yield of(kind, "AutoModelForMaskedLM", text, **SMALL, embedding_size=128, attention_probs_dropout_prob=0.0,
                 pad_token_id=0, cls_token_id=1, sep_token_id=2, bos_token_id=1, eos_token_id=2)  # fmt: skip
    yield of("roberta", "AutoModel", text, **SMALL, attention_probs_dropout_prob=0.0)
    yield of("deberta-v2", "AutoModel", text, **SMALL)
    yield of("t5", "AutoModelForSeq2SeqLM", [*text, Input("labels", (2, 32), "int64")], num_layers=2, d_model=128,
             decoder_start_token_id=0)  # fmt: skip
    yield of("bart", "AutoModel", text, encoder_layers=2, decoder_layers=2, d_model=128, vocab_size=512)
    for kind in ("vit", "dinov2", "swin", "convnextv2", "segformer"):
        depth = {} if kind == "convnextv2" else {"num_hidden_layers": 2}
        yield of(kind, "AutoModelForImageClassification", [image(224, "pixel_values")], **depth)
    yield of("detr", "AutoModelForObjectDetection", [image(224, "pixel_values", 1)], encoder_layers=1, decoder_layers=1,
             use_timm_backbone=False, use_pretrained_backbone=False)  # fmt: skip
    yield of("clip", "AutoModel", [Input("input_ids", (2, 77), "int64"), image(224, "pixel_values")])
    audio = {"num_hidden_layers": 2, "layerdrop": 0.0, "mask_time_prob": 0.0, "encoder_layerdrop": 0.0}
    yield of("wav2vec2", "AutoModelForCTC", [Input("input_values", (1, 16000))], **audio)
    heard = [Input("input_features", (1, 80, 3000)), Input("decoder_input_ids", (1, 32), "int64")]
    yield of("whisper", "AutoModelForSpeechSeq2Seq", heard, encoder_layers=2, decoder_layers=2)


def diffusers_cases() -> Iterator[Case]:
    import diffusers

    def unet() -> nn.Module:
        module: nn.Module = diffusers.UNet2DModel(sample_size=32, block_out_channels=(32, 64, 64, 64))
        return module

    latents, step = Input("sample", (1, 4, 32, 32)), Input("timestep", (1,), "int64")
    words = Input("encoder_hidden_states", (1, 16, 64))
    yield Case("diffusers", "UNet2DModel", unet, [Input("sample", (1, 3, 32, 32)), step])
    narrow = {"block_out_channels": (32, 64, 64, 64), "cross_attention_dim": 64, "attention_head_dim": 8}
    yield Case("diffusers", "UNet2DConditionModel", lambda: diffusers.UNet2DConditionModel(**narrow),
               [latents, step, words])  # fmt: skip
    yield Case("diffusers", "AutoencoderKL", lambda: diffusers.AutoencoderKL(block_out_channels=(32,)), [image(64)])
    yield Case("diffusers", "VQModel", lambda: diffusers.VQModel(block_out_channels=(32,)), [image(64)])
    yield Case("diffusers", "DiTTransformer2DModel",
               lambda: diffusers.DiTTransformer2DModel(num_layers=2, num_attention_heads=4, sample_size=32),
               [Input("hidden_states", (1, 4, 32, 32)), step, Input("class_labels", (1,), "int64")])  # fmt: skip
    yield Case("diffusers", "PixArtTransformer2DModel",
               lambda: diffusers.PixArtTransformer2DModel(num_layers=2, num_attention_heads=4, caption_channels=64,
                                                          attention_head_dim=16, cross_attention_dim=64,
                                                          sample_size=32, use_additional_conditions=False),
               [Input("hidden_states", (1, 4, 32, 32)), words, step])  # fmt: skip
    yield Case("diffusers", "SD3Transformer2DModel",
               lambda: diffusers.SD3Transformer2DModel(sample_size=32, num_layers=2, num_attention_heads=4,
                                                       attention_head_dim=32, joint_attention_dim=64, in_channels=4,
                                                       caption_projection_dim=128, pooled_projection_dim=32,
                                                       out_channels=4),
               [Input("hidden_states", (1, 4, 32, 32)), words, Input("pooled_projections", (1, 32)), step])  # fmt: skip
    yield Case("diffusers", "UNet1DModel",
               lambda: diffusers.UNet1DModel(block_out_channels=(32, 32, 64), extra_in_channels=64),
               [Input("sample", (2, 2, 4096)), step])  # fmt: skip


def pyg_cases() -> Iterator[Case]:
    from torch_geometric import nn as graph

    weights, kinds = Input("edge_weight", (1000,)), Input("edge_type", (1000,), "int64")
    built: dict[str, Callable[[], nn.Module]] = {
        "GCN": lambda: graph.GCN(32, 64, 3, 8),
        "GAT": lambda: graph.GAT(32, 64, 3, 8, heads=4),
        "GraphSAGE": lambda: graph.GraphSAGE(32, 64, 3, 8),
        "GIN": lambda: graph.GIN(32, 64, 3, 8),
        "GATv2Conv": lambda: graph.GATv2Conv(32, 64, heads=2),
        "TransformerConv": lambda: graph.TransformerConv(32, 64, heads=2),
        "ChebConv": lambda: graph.ChebConv(32, 64, K=3),
        "EdgeConv": lambda: graph.EdgeConv(nn.Linear(64, 64)),
        "GraphUNet": lambda: graph.GraphUNet(32, 64, 8, 2),
        "SAGPooling": lambda: graph.SAGPooling(32),
        "GPSConv": lambda: graph.GPSConv(32, graph.GCNConv(32, 32), heads=4),
    }
    for name, build in built.items():
        yield Case("torch_geometric", name, build, GRAPH)
    yield Case("torch_geometric", "GCN, edge weights", built["GCN"], [*GRAPH, weights])
    yield Case("torch_geometric", "RGCNConv", lambda: graph.RGCNConv(32, 64, 5), [*GRAPH, kinds])


class DLRM(nn.Module):
    """Dense and sparse features, their pairwise products, and what they say of a click (arXiv 1906.00091)."""

    def __init__(self, tables: int = 8, rows: int = 100_000, width: int = 64, sparse: bool = True) -> None:
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum", sparse=sparse) for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(13, 256), nn.ReLU(), nn.Linear(256, width), nn.ReLU())
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, 256), nn.ReLU(), nn.Linear(256, 1))

    def forward(self, dense: Tensor, indices: list[Tensor], offsets: list[Tensor]) -> Tensor:
        first = self.bottom(dense)
        features = [first, *(bag(i, o) for bag, i, o in zip(self.bags, indices, offsets, strict=True))]
        stacked = torch.stack(features, 1)
        products = stacked @ stacked.transpose(1, 2)
        row, column = torch.tril_indices(len(features), len(features), offset=-1)
        return torch.sigmoid(self.top(torch.cat([first, products[:, row, column]], 1)))


def torch_cases() -> Iterator[Case]:
    inputs = [Input("dense", (128, 13))]
    for i in range(8):
        inputs += [Input(f"indices.{i}", (512,), "int64", "100000"), Input(f"offsets.{i}", (128,), "int64")]
    yield Case("torch", "DLRM", DLRM, inputs)
    yield Case("torch", "nn.Transformer", lambda: nn.Transformer(128, 4, 2, 2, 256, batch_first=True),
               [Input("src", (2, 32, 128)), Input("tgt", (2, 24, 128))])  # fmt: skip
    yield Case("torch", "nn.LSTM", lambda: nn.LSTM(64, 128, 2), [Input("input", (32, 4, 64))])


LIBRARIES = {
    "timm": timm_cases,
    "torchvision": torchvision_cases,
    "transformers": transformers_cases,
    "diffusers": diffusers_cases,
    "torch_geometric": pyg_cases,
    "torch": torch_cases,
}


def cases(named: set[str] | None = None) -> Iterator[Case]:
    """All of them, or those with one of the names; a library that is not installed is skipped and said."""
    _operators_of_torchvision()
    for library, found in LIBRARIES.items():
        try:
            yield from (case for case in found() if not named or {case.name, library} & named)
        except ImportError as error:
            logging.getLogger(__name__).warning("%s is skipped: %s", library, error)


def _operators_of_torchvision() -> None:
    """A torchvision built for CUDA has no operators beside a torch without: their names are enough for its models."""
    try:
        importlib.import_module("torchvision")
    except ImportError:
        return
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        globals()["_KEPT"] = library  # defined for as long as it lives


# -- on real tensors -------------------------------------------------------------------------------------------------


def real_step(case: Case) -> tuple[int, int]:
    """FLOPs by PyTorch's counter, and bytes that autograd holds."""
    torch.manual_seed(0)
    module = case.build()
    config = getattr(module, "config", None)
    vocabulary = getattr(config, "vocab_size", None) if not isinstance(config, dict) else None
    given, _ = make_tensors(named_inputs(case.inputs), torch.empty, lambda t: t, True, vocabulary)
    args, kwargs = arguments(module, given)
    rnn = any(isinstance(child, nn.RNNBase) for child in module.modules())
    with torch.backends.mkldnn.flags(enabled=not rnn):  # oneDNN hides a recurrent layer's products, also from torch
        held = _held_bytes(module, args, kwargs, given)
        with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
            _backward(_floating(module(*args, **kwargs)))
    return counter.get_total_flops(), held


def _backward(ends: list[Tensor]) -> None:
    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])


def _held_bytes(module: nn.Module, args: Any, kwargs: Any, given: Any) -> int:
    known = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers(), *_tensors(given)]}
    kept: list[weakref.ref[_Held]] = []

    def pack(tensor: Tensor) -> _Held:
        held = _Held(tensor.detach())  # a graph that holds itself is never freed
        kept.append(weakref.ref(held))
        return held

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda held: held.tensor):
        outputs = module(*args, **kwargs)
    known |= {t.untyped_storage().data_ptr() for t in _tensors(outputs)}
    storages = [held.tensor.untyped_storage() for held in (ref() for ref in kept) if held is not None]
    return sum({s.data_ptr(): s.nbytes() for s in storages if s.data_ptr() not in known}.values())


class _Held:
    """A saved tensor: gone when the part of the graph that saved it is."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def _attention_flops(q: Any, k: Any, v: Any, causal: bool) -> int:
    """Of one product of scores and one with values; of causal scores, those that count."""
    pairs = attention_score_pairs(q[2], k[2]) if causal else 2 * q[2] * k[2]
    return int(q[0] * q[1] * pairs * (q[3] + v[3]))


def _forward(q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *_: Any, **more: Any) -> int:
    return _attention_flops(q, k, v, more.get("is_causal", causal))


def _backward_attention(_g: Any, q: Any, k: Any, v: Any, _o: Any, _l: Any, _d: float, causal: bool, **_: Any) -> int:
    return 2 * _attention_flops(q, k, v, causal)


def _convolution_backward(dy: Any, x: Any, weight: Any, _b: Any, _s: Any, _p: Any, _d: Any, transposed: bool,
                          _op: Any, _groups: int, mask: Any, **_: Any) -> int:  # fmt: skip
    return int(sum(mask[:2]) * conv_flop_count(x, weight, dy, transposed=transposed))


def _grouped(a: Any, b: Any, *_: Any, **__: Any) -> int:
    return int(2 * a[-2] * a[-1] * b[-1] * (a[0] if len(a) == len(b) == 3 else 1))


FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _forward,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _backward_attention,
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten._grouped_mm: _grouped,
}


# -- the table -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    case: Case
    traced: ModuleTrace | None = None
    why_not: str = ""
    real: tuple[int, int] | None = None
    real_failed: str = ""

    @property
    def answer(self) -> str:
        if self.traced is None:
            return f"no: {self.why_not}"
        words = {name for name, *_ in self.traced.assumptions}
        return "real step" if "a step on real tensors" in words else "built, traced" if "weights" in words else "traced"

    def check(self) -> str:
        if self.traced is None or self.real is None:
            return self.real_failed or "-"
        flops, saved = total_flops(self.traced.operations), saved_bytes(self.traced.operations)
        parts = [
            f"{name} {units.signed_percent(mine / theirs - 1) if theirs else '-'}"
            for name, mine, theirs in (("FLOPs", flops, self.real[0]), ("saved", saved, self.real[1]))
            if mine != theirs
        ]
        return ", ".join(parts) or "equal"

    def cells(self) -> list[str]:
        shapes = " ".join(f"{'x'.join(map(str, i.shape))}" for i in self.case.inputs[:3])
        if self.traced is None:
            return [self.case.name, shapes, self.answer.replace("|", "/"), *"-----"]
        peak = peak_memory(step_of_trace(self.traced, cpu=True)).total
        return [
            self.case.name, shapes, self.answer, units.count(self.traced.parameters),
            units.si(total_flops(self.traced.operations), "FLOP"), units.bytes_(saved_bytes(self.traced.operations)),
            units.bytes_(peak), self.check(),
        ]  # fmt: skip


def row(case: Case, check: bool) -> Row:
    try:
        traced = trace(case.build, case.inputs)
    except UserError as error:
        return Row(case, why_not=str(error))
    if not check:
        return Row(case, traced)
    try:
        return Row(case, traced, real=real_step(case))
    except Exception as error:
        return Row(case, traced, real_failed=f"does not run here: {type(error).__name__}: {error!s:.80}")


HEADER = ["module", "inputs", "answered", "parameters", "FLOPs", "saved", "peak", "check"]


Tables = dict[str, dict[str, list[str]]]  # cells by library and module


def read_tables(page: Path) -> Tables:
    """What an earlier run wrote, so that a run of some modules keeps the others."""
    tables: Tables = {library: {} for library in LIBRARIES}
    library = ""
    for line in page.read_text(encoding="utf-8").splitlines() if page.is_file() else ():
        cells = [cell.strip() for cell in line.strip("| ").split(" | ")]
        if line.startswith("## "):
            library = line[3:]
        elif line.startswith("| ") and cells[0] not in ("module", "---"):
            tables[library][cells[0]] = cells
    return tables


def versions() -> str:
    """Of every library that is installed here."""
    found = ((name, name.replace("_", "-")) for name in ("torch", *(each for each in LIBRARIES if each != "torch")))
    return ", ".join(
        f"{name} {metadata.version(package).split('+')[0]}" for name, package in found if importlib.util.find_spec(name)
    )


def document(tables: Tables) -> str:
    rows = [cells for table in tables.values() for cells in table.values()]
    answered = [cells for cells in rows if not cells[2].startswith("no")]
    ran = [cells for cells in answered if cells[-1] == "equal" or "%" in cells[-1]]
    equal = [cells for cells in ran if cells[-1] == "equal"]
    lines = [
        "# Modules of others", "",
        inspect.cleandoc(f"""
        `python benchmarks/modules.py --out benchmarks/results/modules.md` plans modules of timm, torchvision,
        transformers, diffusers and PyTorch Geometric by tracing and compares them with PyTorch on real tensors on a CPU
        ({datetime.date.today()}). Of {len(rows)} modules {len(answered)} are answered;
        {len(ran)} ran here for real, and of {len(equal)} of them FLOPs equal `torch.utils.flop_counter`'s and
        saved bytes equal the storages that autograd holds, to the last unit.

        Versions: {versions()};
        a processor with {torch.backends.cpu.get_cpu_capability()}.

        FLOPs are those of one forward and backward pass; the counter is given formulas for attention and grouped
        products on a CPU, which it counts as nothing, and for weight gradients of grouped convolutions, which it
        overcounts. Peak: weights, gradients, AdamW's moments and activations. No figure is by a clock, so that a busy
        machine gives the same table. *Built, traced* reads weights while it is constructed; *real step* looks at values
        in its forward pass, so that its numbers are those of one draw of them.

        Where they differ: a batch of one has other strides without memory, so that a real run copies what a trace does
        not, and the other way round (UNet2DModel); GraphUNet multiplies sparse matrices, which the counter takes for
        dense ones.
        """), "",
    ]  # fmt: skip
    for library, table in tables.items():
        if table:
            shown = [HEADER, ["---"] * len(HEADER), *table.values()]
            lines += [f"## {library}", "", *("| " + " | ".join(cells) + " |" for cells in shown), ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", help="modules or libraries; all without")
    parser.add_argument("--out", type=Path, help="write the table")
    parser.add_argument("--no-check", action="store_true", help="trace only")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    tables = read_tables(options.out) if options.out else {library: {} for library in LIBRARIES}
    for case in cases(set(options.names)):
        cells = row(case, not options.no_check).cells()
        print(case.library, *cells, sep=" | ", flush=True)
        tables[case.library][case.name] = cells
        if options.out:
            options.out.write_text(document(tables), encoding="utf-8")
        gc.collect()


if __name__ == "__main__":
    main()
