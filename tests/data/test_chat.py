"""Conversations: what the assistant says is learned, and nothing else; the same tokens as transformers'."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from ironlaw.config import build_config
from ironlaw.data import tokenizer as tokenizers
from ironlaw.data.batch import IGNORED
from ironlaw.data.chat import Text, read_template
from ironlaw.data.config import DataConfig
from ironlaw.data.loader import Loader
from ironlaw.data.prepare import prepare
from ironlaw.errors import UserError

CHATML = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def talk(*turns: str, system: str = "Be brief.") -> list[dict[str, str]]:
    roles = ["system", *["user", "assistant"] * len(turns)]
    return [{"role": role, "content": text} for role, text in zip(roles, (system, *turns), strict=False)]


TALKS = [talk(f"What is {i} + {i}?", f"It is {2 * i}, é.", "Sure?", " Yes.\n") for i in range(40)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a byte-level tokenizer that knows ChatML's tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    folder = tmp_path_factory.mktemp("tokenizer")
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=320, special_tokens=special, initial_alphabet=alphabet)
    inner.train_from_iterator([m["content"] for t in TALKS for m in t], trainer)
    inner.save(str(folder / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "chat_template": CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def text(folder: Path, template: str) -> Text:
    return Text(tokenizers.load(folder), template, read_template(folder)[1])


def config(folder: Path, tokenizer: Path, lines: list[str], **more: object) -> DataConfig:
    (folder / "talks.jsonl").write_text("\n".join(lines))
    return DataConfig(
        path=str(folder / "talks.jsonl"), format="chat", tokenizer=str(tokenizer), cache=str(folder / "cache"),
        validation_fraction=0.2, **more,
    )  # fmt: skip


def test_the_mask_is_that_of_transformers(tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)
    ours = text(tokenizer, CHATML)
    for messages in TALKS[:10]:
        made = theirs.apply_chat_template(messages, return_assistant_tokens_mask=True, return_dict=True)
        ids, learned = ours.conversation(messages)
        assert ids.tolist() == made["input_ids"] and learned.astype(int).tolist() == made["assistant_masks"]
        assert ours.chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


def test_a_template_that_marks_nothing_gives_what_answers_add(tokenizer: Path) -> None:
    plain = text(tokenizer, UNMARKED)
    ids, learned = plain.conversation(TALKS[3])
    assert ids.tolist() == text(tokenizer, CHATML).conversation(TALKS[3])[0].tolist()
    assert plain.decode(ids[learned]) == "It is 6, é.<|im_end|>\n Yes.\n<|im_end|>\n"
    rewriting = UNMARKED.replace("m.content", "(m.content if loop.last else 'cut')")
    with pytest.raises(UserError, match="rewrites earlier turns"):
        text(tokenizer, rewriting).conversation(TALKS[3])


def test_the_token_that_ends_a_turn_is_the_templates(tokenizer: Path) -> None:
    marked = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }} <|im_end|>\n{% endfor %}"
    inner = text(tokenizer, marked).tokenizer
    assert text(tokenizer, marked).turn_ends() == {inner.token_to_id("<|im_end|>")}
    marks = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>{% endfor %}"
    assert text(tokenizer, marks).turn_ends() == {inner.token_to_id("<|im_end|>")}
    for none in ("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "{{ raise_exception('no') }}"):
        assert text(tokenizer, none).turn_ends() == set()


def test_a_template_that_fails_is_told_in_a_line(tokenizer: Path) -> None:
    faulty = text(tokenizer, "{{ count + messages[0].content }}")
    assert faulty.turn_ends() == set()
    with pytest.raises(UserError, match="refuses: unsupported operand"):
        faulty.chat(talk("a", "b"), {"count": 3})


def test_a_template_meets_the_names_and_filters_that_transformers_gives_it(tokenizer: Path) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    source = (
        "{% if tools is not none or documents is not none %}tools{% endif %}{{ messages[0].content }}"
        "{{ {'b': 'é<', 'a': 1} | tojson(ensure_ascii=True, sort_keys=True, separators=(',', ':')) }}"
    )
    ((wanted, *_), _) = render_jinja_template([talk("a")], chat_template=source)
    ours = text(tokenizer, source)
    assert ours.decode(ours.chat(talk("a"))) == wanted


def test_a_user_who_spells_a_special_token_ends_no_turn(tokenizer: Path) -> None:
    ours = text(tokenizer, CHATML)
    ids, learned = ours.conversation(talk("a<|im_end|>b", "c<|im_start|>d"))
    end = ours.tokenizer.token_to_id("<|im_end|>")
    assert (ids == end).sum() == 3  # one for each message
    assert ours.decode(ids[learned]) == "c<|im_start|>d<|im_end|>"
    with pytest.raises(UserError, match="cannot quote it"):
        text(tokenizer, UNMARKED.replace("m.content", "m.content[:2]")).conversation(talk("a<|im_end|>b", "c"))


TOOLS = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)


def call(**arguments: str) -> dict[str, object]:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


def test_tools_and_their_calls_are_those_of_transformers(tmp_path: Path, tokenizer: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tokenizer)
    messages = [talk("?")[1], {"role": "assistant", "content": None, "tool_calls": [call(city="Rome")]}]
    messages += [{"role": "tool", "content": "12"}, {"role": "assistant", "content": "It is 12."}]
    tools = [{"type": "function", "function": {"name": "weather", "parameters": {}}}]
    lines = [{"messages": [talk(f"{i}?")[1], *messages[1:]], "tools": tools} for i in range(20)]
    template = tmp_path / "tools.jinja"
    template.write_text(TOOLS)
    given = config(tmp_path, tokenizer, [*map(json.dumps, lines)], chat_template=str(template))
    dataset = prepare(given, 400)
    assert dataset.skipped == {} and dataset.train.marks is not None
    rows = zip(dataset.train.bounds, dataset.train.bounds[1:], strict=False)
    kept = {tuple(np.asarray(dataset.train.tokens[a:b]).tolist()) for a, b in rows}
    for line in lines:
        wanted = theirs.apply_chat_template(
            **{"conversation": line["messages"], "tools": tools}, chat_template=TOOLS, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
        ids, learned = text(tokenizer, TOOLS).conversation(line["messages"], tools)
        assert (ids.tolist(), [*map(int, learned)]) == (wanted["input_ids"], wanted["assistant_masks"])
        kept.discard((*ids.tolist(), dataset.end_of_text))
    assert not kept


def test_a_call_that_spells_a_special_token_ends_no_turn(tokenizer: Path) -> None:
    ours = text(tokenizer, TOOLS)
    messages = [talk("?")[1], {"role": "assistant", "content": "", "tool_calls": [call(city="Rome<|im_end|>")]}]
    ids, _ = ours.conversation(messages)
    assert (ids == ours.tokenizer.token_to_id("<|im_end|>")).sum() == 2 and "Rome<|im_end|>" in ours.decode(ids)


def test_a_single_pair_of_answers_cannot_be_held_out(tmp_path: Path, tokenizer: Path) -> None:
    """Of a single document the tail is, but half a pair is none."""
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "a ", "chosen": "good", "rejected": "bad"}\n' * 3)
    own = {"tokenizer": str(tokenizer), "cache": str(tmp_path / "cache")}
    with pytest.raises(UserError, match="is held out"):
        prepare(DataConfig(path=str(tmp_path / "pairs.jsonl"), format="pairs", **own), 400)
    (tmp_path / "pairs.jsonl").write_text('{"chosen": "good", "rejected": "bad"}')
    with pytest.raises(UserError, match=r'without text as "prompt" in its first line: write prompt, chosen'):
        prepare(DataConfig(path=str(tmp_path / "pairs.jsonl"), format="pairs", **own), 400)


def test_batches_learn_answers_only(tmp_path: Path, tokenizer: Path) -> None:
    given = config(tmp_path, tokenizer, [json.dumps({"messages": t}) for t in TALKS])
    assert given.packing == "best_fit" and DataConfig(**given.model_dump()) == given
    dataset = prepare(given, 400)
    loader = Loader(dataset, given, 64)
    ours = dataset.tokenizer()
    seen = set()
    for batch in (*loader.validation(4, None), *(loader.training(4, 0).batch(step) for step in range(12))):
        for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
            kept = targets != IGNORED
            # A target is the token after its input.
            assert (targets[:-1][kept[:-1]] == inputs[1:][kept[:-1]]).all()
            said = ours.decode(targets[kept], skip_special=False).split("<|im_end|>")
            seen |= {part for part in said if part.strip()}
    assert seen == {m["content"] for t in TALKS for m in t if m["role"] == "assistant"}
    assert dataset.unigram_loss is not None and 0 < dataset.unigram_loss < np.log(400)


def test_with_text_beside_it(tmp_path: Path, tokenizer: Path) -> None:
    given = config(tmp_path, tokenizer, [json.dumps({"messages": t}) for t in TALKS])
    (tmp_path / "plain").mkdir()
    for i in range(6):
        (tmp_path / "plain" / f"{i}.txt").write_text(f"{i} all of this is learned " * 20)
    sources = [{"path": given.path, "format": "chat"}, {"path": str(tmp_path / "plain")}]
    both = DataConfig(sources=sources, **given.model_dump(include={"tokenizer", "cache", "validation_fraction"}))
    dataset = prepare(both, 400)
    learned = np.asarray(dataset.train.marks) == 0
    split = len(dataset.sources[0].train.tokens)
    assert len(learned) == len(dataset.train.tokens) and 0 < learned[:split].mean() < 1 and learned[split:].all()
    batch = Loader(dataset, both, 64).training(8, 0).batch(0)
    assert 0 < (batch.targets == IGNORED).mean() < 1


@pytest.mark.parametrize(("line", "reason"), [
    ('{"messages": "hi"}', "is without a list of messages"),
    ('{"messages": [{"content": "x"}]}', 'is without a "role" in every message'),
    ('{"messages": [{"role": "user", "content": 3}]}', 'is without text as "content" of every message'),
    ('{"messages": [{"role": "user", "content": "x"}]}', "is without an answer of the assistant"),
    ('{"talk": []}', 'has no field "messages": set data.field to one of talk'),
])  # fmt: skip
def test_what_is_no_conversation_is_said_in_one_line(tmp_path: Path, tokenizer: Path, line: str, reason: str) -> None:
    with pytest.raises(UserError) as error:
        prepare(config(tmp_path, tokenizer, [line]), 400)
    assert reason in str(error.value) and "\n" not in str(error.value)
    # Among others it is counted.
    counted = prepare(config(tmp_path, tokenizer, [*(json.dumps({"messages": t}) for t in TALKS), line]), 400)
    assert sum(counted.skipped.values()) == 1


def test_what_does_not_go_with_conversations(tmp_path: Path, tokenizer: Path) -> None:
    lines = [json.dumps({"messages": t}) for t in TALKS]
    bare = tmp_path / "bare.json"
    bare.write_bytes((tokenizer / "tokenizer.json").read_bytes())
    with pytest.raises(UserError, match="no chat template beside"):
        prepare(config(tmp_path, bare, lines), 400)
    (tmp_path / "own.jinja").write_text(UNMARKED)
    assert (
        prepare(config(tmp_path, bare, lines, chat_template=str(tmp_path / "own.jinja")), 400).train.marks is not None
    )
    with pytest.raises(UserError, match=r"need the tokenizer of the model that learns"):
        prepare(config(tmp_path, bare, lines).model_copy(update={"tokenizer": None}), 400)
    model = {"layers": 1, "hidden": 8, "heads": 1, "vocab": 400, "context": 16}
    for data, message in [
        ({"format": "chat", "packing": "concat"}, 'use data.packing = "best_fit"'),
        ({"format": "chat", "streaming": True}, "cannot pack best_fit"),
        ({"chat_template": "x"}, 'add data.format = "chat"'),
    ]:
        with pytest.raises(UserError, match=message):
            build_config({"model": model, "data": data})


@pytest.mark.parametrize(("written", "found"), [
    ("x", "x"), ([{"name": "default", "template": "y"}], "y"), (["x"], None), ([{"name": "default"}], None), (3, None),
])  # fmt: skip
def test_a_template_is_found_in_every_form_and_no_other(tmp_path: Path, written: object, found: str | None) -> None:
    fields = {"chat_template": written, "eos_token": {"content": "z"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(fields))
    assert read_template(tmp_path) == (found, {"eos_token": "z"})


@pytest.mark.parametrize(("template", "says"), [
    ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1,000,000 passes"),
    ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "refuses: maximum recursion"),
    ("{{ messages[0].content + 1 }}", "refuses: can only concatenate"),
    *((f"{{% set n = namespace(s='ab') %}}{{% for i in range(50) %}}{{% set n.s {again} %}}{{% endfor %}}", "it makes")
      for again in ("= n.s ~ n.s", "= n.s + n.s", "%}{{ n.s }}{{ n.s }}{% endset")),
    *((f"{{{{ {made} }}}}", "it makes more than") for made in (
        "'a' * 10**9", "[1] * 10**9", "10 ** (10 ** 9)", "'%999999999d' % 1", "'a'.center(10**9)",
        "'a' | center(10**9)", "'{:>999999999}'.format(1)", "('a' * 10**5).replace('a', 'b' * 10**5)",
        "'a'.translate({97: 'b' * 10**6})", "range(9999) | map('string') | join('a' * 9**5)",
        "('a ' * 10**5) | wordwrap(1, true, 'b' * 10**4)")),
    ("{% set n = namespace(s=[]) %}{% for i in range(99) %}{% set n.s = n.s + ['a' * 10**6] %}{% endfor %}", "makes"),
    ("{% if 1 %}" * 200 + "{% endif %}" * 200, "cannot be read"),
])  # fmt: skip
def test_a_template_of_somebody_s_comes_to_an_end(tokenizer: Path, template: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        text(tokenizer, template).chat([{"role": "user", "content": "a"}])
