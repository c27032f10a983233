"""Chat templates of folders: tokens and answers are those of transformers, and what cannot be is said."""

import gc
import json
import pickle
import re
import sys

import pytest

from fsdpx import models
from fsdpx.data import SupervisedDataset
from fsdpx.errors import ConfigError, DataError
from fsdpx.examples import finetune
from fsdpx.models import chat
from fsdpx.models.tokenizer_files import load_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CHATML = """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
LLAMA = """{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}[INST] {{ m['content'] }} [/INST]
{% else %} {{ m['content'] }}{{ eos_token }}{% endif %}{% endfor %}"""
MARKED = """{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}
{{ m.content }}{{ eos_token }}{% endgeneration %}{% elif m.role == 'tool' %}{% continue %}
{% else %}{{ m | tojson }}{% endif %}{% endfor %}"""
CHANGING = "{% for m in messages %}{{ m.content }}{% if loop.last %}</s>{% endif %}{% endfor %}"
CHAT = [
    {"role": "user", "content": "one and two"},
    {"role": "assistant", "content": "an answer", "tool_calls": None},
    {"role": "tool", "content": "no"},
    {"role": "user", "content": "more é"},
    {"role": "assistant", "content": "last one"},
]


def folder(path, template):
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=MARKS, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(["one and two", "an answer and the last one", "user assistant"], trainer)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>")
    theirs.chat_template = template
    theirs.save_pretrained(path)
    return path, theirs


@pytest.mark.parametrize("template", [CHATML, LLAMA, MARKED], ids=["chatml", "llama", "marked"])
def test_tokens_are_those_of_transformers(tmp_path, template):
    _, theirs = folder(tmp_path, template)
    tokenizer = load_tokenizer(tmp_path)
    ours = models.chat_template(tmp_path, tokenizer)
    wanted = theirs.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=template == MARKED)
    tokens, learnt = ours.encode_conversation(CHAT)
    assert tokens == wanted["input_ids"]
    said = [tokenizer.decode([t], skip_special_tokens=False) if a else "|" for t, a in zip(tokens, learnt, strict=True)]
    answers = re.sub(r"\|+", "|", "".join(said)).strip("|")
    if template == MARKED:
        assert learnt == [bool(one) for one in wanted["assistant_masks"]]
        assert answers == "an answer</s>|last one</s>"
    elif template == CHATML:
        assert answers == "an answer<|im_end|>\n|last one<|im_end|>\n"
    asked = theirs.apply_chat_template(CHAT[:1], add_generation_prompt=True)["input_ids"]
    assert ours.encode_question("one and two") == asked


@pytest.mark.parametrize("place", ["list", "text", "file"])
def test_a_template_is_found_where_transformers_finds_it(tmp_path, place):
    settings = {"bos_token": {"content": "<s>"}, "add_bos_token": True}
    if place == "list":
        settings["chat_template"] = [{"name": "tools", "template": "x"}, {"name": "default", "template": CHATML}]
    else:
        settings["chat_template"] = CHATML if place == "text" else "other"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if place == "file":
        (tmp_path / "chat_template.jinja").write_text(CHATML)
    found = models.chat_template(tmp_path, None)
    assert (found.source, found.names) == (CHATML, {"bos_token": "<s>"})


def test_what_cannot_be_is_said(tmp_path, monkeypatch):
    lines = tmp_path / "data.jsonl"
    lines.write_text(json.dumps({"messages": CHAT}))
    for template, said in {
        CHANGING: r"data\.jsonl, line 1: the chat template .*chat_template\.jinja writes message 2 in another way",
        "{{ raise_exception('no tool') }}": r"line 1: the chat template .* does not take it: no tool",
        "{{ messages.__class__.__mro__ }}": r"does not take it: access to attribute '__class__' ",
        "{{ messages.append(1) }}": r"does not take it: access to attribute 'append' of 'list' object is unsafe",
    }.items():
        path, _ = folder(tmp_path / "a", template)
        with pytest.raises(DataError, match=said):
            SupervisedDataset(lines, list, 99, end=0, template=models.chat_template(path, load_tokenizer(path)))
    (path / "chat_template.jinja").write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: this is no template of Jinja2: Expected"):
        models.chat_template(path, load_tokenizer(path)).encode_question("a")
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(ConfigError, match=r"template\.jinja needs the jinja2 library: pip install '\.\[text\]'"):
        models.chat_template(path, load_tokenizer(path)).encode_question("a")
    (path / "chat_template.jinja").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja: .*codec can't decode byte 0xe9 in position 0"):
        models.chat_template(path, None)
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").write_text('{"chat_template": 3}')
    with pytest.raises(ConfigError, match="chat_template must be a text, or a list of which one has the name default"):
        models.chat_template(path, None)


@pytest.mark.parametrize("template", [None, CHATML])
def test_the_example_says_how_conversations_are_written(tmp_path, template, capsys):
    path, theirs = folder(tmp_path / "a", template)
    lines = tmp_path / "data.jsonl"
    lines.write_text(json.dumps({"messages": CHAT}) + '\n{"prompt": "one", "completion": "two"}')
    tokenizer = load_tokenizer(path)
    found = models.chat_template(path, tokenizer)
    samples = SupervisedDataset(
        lines, lambda text: tokenizer.encode(text, add_special_tokens=False).ids, 99, end=1, template=found
    )
    if template is not None:
        wanted = theirs.apply_chat_template(CHAT)["input_ids"][:-1]
        assert samples[0][0].tolist()[: len(wanted)] == wanted
    finetune.warn_if_data_and_chat_template_disagree(samples, found, "FOLDER")
    assert capsys.readouterr().out == (
        "FOLDER: there is no chat template (chat_template.jinja, or chat_template in tokenizer_config.json): messages "
        "are written as 'role: content'\n"
        if template is None
        else f"prompts and completions are joined as they are, without the chat template {path}/chat_template.jinja: "
        "give messages\n"
    )


@pytest.mark.parametrize(
    ("template", "error", "why"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", DataError, "1,000 rounds"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            DataError, "1,000 rounds"),
        ("{{ lipsum(n=1) }}", DataError, "'lipsum' is undefined"),
        ("{{ messages | tojson(cls=namespace, encode=dict) }}", DataError, "unexpected keyword argument"),
        ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, ConfigError, "this is no template of Jinja2: too many"),
        ("{{" + "(" * 3000 + "1" + ")" * 3000 + "}}", ConfigError, "this is no template of Jinja2: maximum recursion"),
    ],
)  # fmt: skip
def test_a_hostile_template_ends_in_words(template, error, why, monkeypatch):
    monkeypatch.setattr(chat, "MOST_ROUNDS", 1000)
    made = chat.ChatTemplate(template, "the chat template", {}, None)
    with pytest.raises(error, match=f"^the chat template.*{why}"):
        made.encode_question("hello")


POWER = "{{ (9**(9**9)) % 7 }}"


@pytest.mark.parametrize(
    ("template", "error", "why"),
    [
        (POWER, ConfigError, "it takes more than 0.2 s"),  # computed while it is compiled
        ("{% set n = messages | length + 8 %}{{ (n**(n**n)) % 7 }}", DataError, "it takes more than 0.2 s"),
        ("{% set ns = namespace(s='a') %}{% for i in range(9) %}{% set ns.s = range(99999) | join(ns.s[:9999]) %}"
            "{% endfor %}", DataError, "it takes more than (0.2 s|256 MiB)"),
        ("{{ range(99999) | sum(start=range(0)) }}", DataError, "unsupported operand"),
        ("{% set x = range(99999) | map('string') | list %}{{ x | sum(start='') }}", DataError, "sum|it takes more"),
        ("{{ range(99999) | groupby('a') | list }}{{ range(99999) | unique | batch(2) | list | tojson(indent=9) }}",
            DataError, "it takes more|has no|undefined|not supported|serializable"),
        ("{{ 'a' * 10**10 }}", DataError, "it takes more than 256 MiB"),
        ("{{ messages[0].content * 10**10 }}", DataError, "it takes more than 256 MiB"),
        ("{{ [messages] * 10**9 }}", DataError, "it takes more than 256 MiB"),
        ("{{ '%2000000000d' % messages | length }}", DataError, "it takes more than 256 MiB"),
        ("{{ messages[0].content | center(2000000000) }}", DataError, "it takes more than 256 MiB"),
        ("{{ '{:2000000000}'.format(messages | length) }}", DataError, "it takes more than 256 MiB"),
        ("{{ messages | tojson(indent=2000000000) }}", DataError, "it takes more than 256 MiB"),
        ("{{ 'a\nb' | indent(2000000000) }}", DataError, "it takes more than 256 MiB"),
        ("{% set ns = namespace(s='a') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}{{ ns.s }}",
            DataError, "it takes more than (256 MiB|0.2 s)"),
        ("{{ range(10**9) | list }}", DataError, "Range too big"),
    ],
)  # fmt: skip
def test_a_single_step_of_a_template_ends_too(template, error, why, monkeypatch):
    monkeypatch.setattr(chat, "SECONDS", 0.2)
    monkeypatch.setattr(chat, "MOST_BYTES", 256 << 20)
    made = chat.ChatTemplate(template, "the chat template", {}, None)
    with pytest.raises(error, match=f"^the chat template.*({why})"):
        made.encode_question("hello")


class Tokens:
    """A tokenizer that gives the text back."""

    def encode(self, text, add_special_tokens):
        self.ids = list(text)
        return self


def test_a_template_that_was_ended_starts_anew_and_its_process_ends_with_it():
    source = "{% if messages[0].content == 'long' %}{% for a in range(2000) %}{% for b in range(2000) %}{% endfor %}"
    made = chat.ChatTemplate(source + "{% endfor %}{% endif %}{{ messages[0].content }}", "it", {}, Tokens())
    assert made.encode_question("a\ud800é") == ["a", "\ud800", "é"]
    first = vars(made)["_started"]
    with pytest.raises(DataError, match="it does not take it: it takes more than 1,000,000 rounds"):
        made.encode_question("long")
    assert made.encode_question("b") == ["b"]
    assert vars(made)["_started"] is first
    first._child.kill()
    first._child.wait()
    assert made.encode_question("c") == ["c"]
    second = vars(made)["_started"]
    assert second is not first
    assert pickle.loads(pickle.dumps(made)).encode_question("d") == ["d"]
    with pytest.raises(DataError, match="it does not take it: Object of type set is not JSON serializable"):
        made.encode_conversation([{"role": "user", "content": {1}}])
    child = second._child
    del made, second
    gc.collect()
    assert child.returncode is not None
