"""Folders of other libraries: each byte is read once and by its owner, and comes out as it went in."""

import json
import os

import numpy as np
import pytest
from models import distributed

import fsdpx
from fsdpx import models, nn
from fsdpx.core.checkpoint import format as layout
from fsdpx.core.checkpoint.format import lay_out_files
from fsdpx.core.comm import spawn
from fsdpx.errors import CheckpointError, ConfigError
from fsdpx.models.pretrained_reader import TensorSource, split_ranges_into_matrix_blocks
from fsdpx.models.tokenizer_files import find_largest_token, read_end_tokens

WIDTH, VOCAB, TIME = 8, 11, 6
CONFIG = {
    "model_type": "gpt2", "vocab_size": VOCAB, "n_embd": WIDTH, "n_layer": 2, "n_head": 2, "n_positions": TIME,
    "activation_function": "gelu_new",
}  # fmt: skip
BLOCK = {
    "ln_1.weight": (WIDTH,), "ln_1.bias": (WIDTH,), "ln_2.weight": (WIDTH,), "ln_2.bias": (WIDTH,),
    "attn.c_attn.weight": (WIDTH, 3 * WIDTH), "attn.c_attn.bias": (3 * WIDTH,), "attn.c_proj.weight": (WIDTH, WIDTH),
    "attn.c_proj.bias": (WIDTH,), "mlp.c_fc.weight": (WIDTH, 4 * WIDTH), "mlp.c_fc.bias": (4 * WIDTH,),
    "mlp.c_proj.weight": (4 * WIDTH, WIDTH), "mlp.c_proj.bias": (WIDTH,),
}  # fmt: skip
SHAPES = {
    "transformer.wte.weight": (VOCAB, WIDTH), "transformer.wpe.weight": (TIME, WIDTH),
    "transformer.ln_f.weight": (WIDTH,), "transformer.ln_f.bias": (WIDTH,),
    **{f"transformer.h.{i}.{name}": shape for i in range(2) for name, shape in BLOCK.items()},
}  # fmt: skip


def folder(path, shapes=SHAPES, shard_bytes=None, config=CONFIG):
    """A model of these tensors, and what is in it."""
    path.mkdir()
    plan = lay_out_files({name: ("F32", shape) for name, shape in shapes.items()}, None, None, shard_bytes)
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    for file, contents in plan.files.items():
        (path / file).write_bytes(contents.header + b"".join(arrays[name].tobytes() for name in contents.tensors))
    for file, text in {**plan.texts, "config.json": json.dumps(config).encode(), "merges.txt": b"a b"}.items():
        (path / file).write_bytes(text)
    return arrays


def demand_refusal(path, wrong, error=ConfigError):
    with pytest.raises(error, match=wrong):
        models.from_pretrained(path)


EXPERTS, HIDDEN = 3, 4
MIXTRAL = {
    "model_type": "mixtral", "vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": HIDDEN,
    "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": TIME,
    "num_local_experts": EXPERTS, "num_experts_per_tok": 2,
}  # fmt: skip
EXPERT = {"w1": (HIDDEN, WIDTH), "w2": (WIDTH, HIDDEN), "w3": (HIDDEN, WIDTH)}
MIXTRAL_BLOCK = {
    "input_layernorm": (WIDTH,), "post_attention_layernorm": (WIDTH,), "self_attn.q_proj": (WIDTH, WIDTH),
    "self_attn.k_proj": (WIDTH, WIDTH), "self_attn.v_proj": (WIDTH, WIDTH),
    "self_attn.o_proj": (WIDTH, WIDTH), "block_sparse_moe.gate": (EXPERTS, WIDTH),
    **{f"block_sparse_moe.experts.{e}.{name}": shape for e in range(EXPERTS) for name, shape in EXPERT.items()},
}  # fmt: skip
MIXTRAL_SHAPES = {
    "model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,), "lm_head.weight": (VOCAB, WIDTH),
    **{f"model.layers.{i}.{name}.weight": shape for i in range(2) for name, shape in MIXTRAL_BLOCK.items()},
}  # fmt: skip
KINDS = {"gpt2": (SHAPES, CONFIG), "mixtral": (MIXTRAL_SHAPES, MIXTRAL)}


def on(ranks, path, use, **options):
    def run(comm):
        return use(distributed(models.from_pretrained(path), comm, loss=nn.CrossEntropyLoss(), **options))

    return spawn(run, ranks)[0]


@pytest.mark.parametrize("kind", KINDS)
def test_every_byte_is_read_once(kind, tmp_path, monkeypatch):
    shapes, config = KINDS[kind]
    arrays, read = folder(tmp_path / "a", shapes, config=config), []
    plain = layout._read_part_into

    def counted(fd, view, offset):
        read.append(done := plain(fd, view, offset))
        return done

    model = models.from_pretrained(tmp_path / "a")
    monkeypatch.setattr(layout, "_read_part_into", counted)

    found = spawn(lambda comm: distributed(model, comm, loss=nn.CrossEntropyLoss()).parameters(), 3)[0]
    assert sum(read) == sum(array.nbytes for array in arrays.values())
    if kind == "gpt2":
        np.testing.assert_array_equal(found["embed.weight"], arrays["transformer.wte.weight"])
        np.testing.assert_array_equal(found["blocks.1.mlp.up.weight"], arrays["transformer.h.1.mlp.c_fc.weight"].T)
    else:
        there = "model.layers.1.block_sparse_moe.experts.{}.{}.weight"
        for name, parts in {"gate": "w1", "up": "w3", "down": "w2"}.items():
            each = [arrays[there.format(e, parts)] for e in range(EXPERTS)]
            np.testing.assert_array_equal(found[f"blocks.1.mlp.{name}"], np.stack(each))


def test_shards_are_filled_in_place(tmp_path, monkeypatch):
    folder(tmp_path / "a", MIXTRAL_SHAPES, config=MIXTRAL)
    plain, filled = TensorSource.try_read_into, list[bool]()

    def counted(source, target, start):
        filled.append(plain(source, target, start))
        return filled[-1]

    monkeypatch.setattr(TensorSource, "try_read_into", counted)
    on(1, tmp_path / "a", lambda trainer: None)
    assert filled
    assert all(filled)


@pytest.mark.parametrize(
    ("ranks", "shard_bytes", "options"),
    [(1, None, {}), (3, 2000, {}), (2, None, {"mesh": fsdpx.Mesh(tensor=2)}), (2, 2000, {"mesh": fsdpx.Mesh(pipe=2)})],
    ids=["alone", "fsdp", "tensor", "pipe"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_trained_is_saved_as_it_was(kind, tmp_path, ranks, shard_bytes, options):
    shapes, config = KINDS[kind]
    folder(tmp_path / "a", shapes, shard_bytes, config)
    on(ranks, tmp_path / "a", lambda trainer: fsdpx.models.save_pretrained(trainer, tmp_path / "b"), **options)
    before, after = ({p.name: p.read_bytes() for p in (tmp_path / name).iterdir()} for name in "ab")
    assert before == after


@pytest.mark.parametrize("there", [True, False])
def test_a_folder_of_a_model_is_written_to_the_end_of_a_link(there, tmp_path):
    folder(tmp_path / "a", SHAPES)
    (tmp_path / "link").symlink_to("b")
    if there:
        (tmp_path / "b").mkdir()
    on(2, tmp_path / "a", lambda trainer: fsdpx.models.save_pretrained(trainer, tmp_path / "link"))
    assert (tmp_path / "link").is_symlink()
    assert {p.name for p in (tmp_path / "b").iterdir()} == {p.name for p in (tmp_path / "a").iterdir()}
    with pytest.raises(CheckpointError, match="b is there, and no empty folder"):
        on(1, tmp_path / "a", lambda trainer: fsdpx.models.save_pretrained(trainer, tmp_path / "link"))


def test_another_format_and_names_without_a_base(tmp_path):
    shapes = {name.removeprefix("transformer."): shape for name, shape in SHAPES.items()}
    arrays = folder(tmp_path / "a", shapes | {"h.0.attn.bias": (1, 1, TIME, TIME)})
    on(2, tmp_path / "a", lambda trainer: fsdpx.models.save_pretrained(trainer, tmp_path / "b", dtype="bf16"))
    assert json.loads((tmp_path / "b" / "config.json").read_bytes())["dtype"] == "bfloat16"
    back = on(2, tmp_path / "b", lambda trainer: trainer.parameters())
    np.testing.assert_allclose(back["blocks.0.mlp.down.weight"].T, arrays["h.0.mlp.c_proj.weight"], rtol=2**-8)


def test_what_is_wrong_is_said(tmp_path):
    demand_refusal("gpt2", "'gpt2' is no folder here, and nothing is downloaded")
    demand_refusal(tmp_path, r"there is no config\.json; .* write one, trainer\.save and .* do not$")
    shapes = {**SHAPES, "transformer.more": (2,), "transformer.wpe.weight": (TIME + 1, WIDTH)}
    del shapes["transformer.ln_f.bias"]
    folder(tmp_path / "a", shapes)
    wrong = (
        r"missing: transformer\.ln_f\.bias; not in the model: transformer\.more; "
        r"transformer\.wpe\.weight is \(7, 8\) instead of \(6, 8\)"
    )
    demand_refusal(tmp_path / "a", wrong, CheckpointError)
    tokenizer = {"model": {"vocab": {"a": 0, "b": 11}}, "added_tokens": [{"id": 5}]}
    (tmp_path / "a" / "tokenizer.json").write_text(json.dumps(tokenizer))
    demand_refusal(tmp_path / "a", "the tokenizer has the token 11, the model a vocabulary of 11")
    (tmp_path / "a" / "config.json").write_text(json.dumps({**CONFIG, "model_type": "gpt3"}))
    demand_refusal(tmp_path / "a", r"'gpt3' is not known; known are gpt2, llama, mistral, mixtral, .*, vit")


@pytest.mark.parametrize(
    ("field", "value", "wrong"),
    [
        ("n_layer", 10**9, f"n_layer={10**9}: it must be a whole number from 1 to the number of tensors in the files"),
        ("n_layer", "2", "n_layer='2': it must be a whole number"),
        ("n_embd", 8.0, r"n_embd=8\.0: it must be a whole number"),
        ("n_head", True, "n_head=True: it must be a whole number"),
        ("vocab_size", 2**31, "vocab_size=2147483648: it must be a whole number from 1 to 2147483647"),
        ("n_inner", [1], r"n_inner=\[1\]: it must be a whole number"),
        ("layer_norm_epsilon", "a", "layer_norm_epsilon='a': it must be a number of at least 0"),
        ("tie_word_embeddings", 1, "tie_word_embeddings=1: it must be true or false"),
        ("activation_function", 3, "activation_function=3: it must be a text"),
        ("hidden_size", 9, "hidden_size=9 and n_embd=8 are the same field"),
        ("architectures", 5, None),
        ("model_type", ["gpt2"], r"the model_type \['gpt2'\] is not known"),
        ("logit_scale", 2.0, r"logit_scale=2\.0: this field is unknown, and may require what is not supported"),
        ("is_causal", False, "is_causal=False is not supported; only True is"),
        ("more", None, None),
    ],
)
def test_what_is_wrong_with_a_field_is_said(field, value, wrong, tmp_path):
    folder(tmp_path / "a", config={**CONFIG, field: value})
    if wrong is None:
        models.from_pretrained(tmp_path / "a")
    else:
        demand_refusal(tmp_path / "a", wrong)


def test_what_is_wrong_with_experts_is_said(tmp_path):
    there = "model.layers.0.block_sparse_moe.experts"
    shapes = {**MIXTRAL_SHAPES, f"{there}.3.w1.weight": (HIDDEN, WIDTH), f"{there}.1.w2.weight": (HIDDEN, WIDTH)}
    del shapes[f"{there}.2.w1.weight"]
    folder(tmp_path / "a", shapes, config=MIXTRAL)
    wrong = rf"missing: {there}\.2\.w1\.weight; not in the model: {there}\.3\.w1\.weight; "
    wrong += rf"{there}\.1\.w2\.weight is \(4, 8\) instead of \(8, 4\)$"
    demand_refusal(tmp_path / "a", wrong, CheckpointError)
    (tmp_path / "a" / "config.json").write_text(json.dumps({**MIXTRAL, "router_jitter_noise": 0.1}))
    demand_refusal(tmp_path / "a", r"router_jitter_noise=0\.1 is not supported; only 0\.0 is")


def test_a_model_of_another_origin_is_not_saved(tmp_path):
    trainer = distributed(nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match=r"not of fsdpx\.models\.from_pretrained; trainer\.save writes any"):
        fsdpx.models.save_pretrained(trainer, tmp_path / "b")
    assert not list(tmp_path.iterdir())


def test_adapters_take_the_names_of_the_folder(tmp_path):
    folder(tmp_path / "a")
    folder(tmp_path / "b", MIXTRAL_SHAPES, config=MIXTRAL)
    for path, theirs, own in (("a", "c_fc", "mlp.up"), ("b", ["q_proj", "*.v_proj"], ["attn.q", "attn.v"])):
        model = models.from_pretrained(tmp_path / path)
        there, here = (nn.add_lora(model, rank=2, targets=targets).specs() for targets in (theirs, own))
        assert there.keys() == here.keys() > model.specs().keys()
    with pytest.raises(ConfigError, match="'k_pro' matches no Linear layer"):
        nn.add_lora(models.from_pretrained(tmp_path / "b"), targets="k_pro")


def test_boxes_are_the_runs():
    whole = np.arange(35).reshape(7, 5)
    for run in [(0, 35), (3, 4), (3, 29), (5, 15), (4, 6), (7, 7)]:
        blocks = split_ranges_into_matrix_blocks([run], 5)
        parts = [whole[b.top : b.bottom, b.left : b.right].reshape(-1) for b in blocks]
        assert np.concatenate([[], *parts]).tolist() == list(range(*run))


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
@pytest.mark.parametrize("kind", ["fifo", "device", "sparse"])
def test_files_that_never_end_are_refused(name, kind, tmp_path):
    folder(tmp_path / "a")
    file = tmp_path / "a" / name
    file.unlink(missing_ok=True)
    if kind == "fifo":
        os.mkfifo(file)
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        file.touch()
        os.truncate(file, 10 << 30)
    demand_refusal(tmp_path / "a", name)


@pytest.mark.parametrize("text", ["[]", '"a"', "{", '{"a": 1, "a": 2}', '{"model": {"vocab": {"a": "b"}}}'])
def test_a_spoilt_tokenizer_is_named(text, tmp_path):
    folder(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text(text)
    says = r"tokenizer\.json(, line 1, byte \d+)?: (this must be an object|this is no|not valid JSON)"
    demand_refusal(tmp_path / "a", says)


def test_bytes_of_another_encoding_have_their_place(tmp_path):
    folder(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_bytes('{\n"_name_or_path": "é"'.encode("latin-1"))
    demand_refusal(tmp_path / "a", r"config\.json, line 2, byte 19: not valid JSON: 0xe9 is not UTF-8")


def test_ends_of_a_text_are_whole_numbers(tmp_path):
    (tmp_path / "config.json").write_text('{"eos_token_id": ["a"]}')
    with pytest.raises(ConfigError, match=r"eos_token_id=\['a'\]: it must be a whole number"):
        read_end_tokens(tmp_path)


def test_links_out_of_the_folder_are_not_copied(tmp_path):
    """What they point at may be a secret of the user who saves; the hub's cache links to its blobs beside."""
    here = tmp_path / "snapshots" / "1"
    here.parent.mkdir()
    folder(here)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "b").write_text("{}")
    (tmp_path / "blobs" / "trap").symlink_to(tmp_path / "secret")
    (here / "vocab.txt").symlink_to(tmp_path / "secret")
    (here / "vocab.model").symlink_to(tmp_path / "blobs" / "trap")
    (here / "tokenizer_config.json").symlink_to("../../blobs/b")
    (here / "merges.txt").chmod(0o600)
    with pytest.warns(RuntimeWarning, match="is a link out of its folder, and is not copied"):
        on(1, here, lambda trainer: fsdpx.models.save_pretrained(trainer, tmp_path / "new"))
    names = {file.name for file in (tmp_path / "new").iterdir()}
    assert names == {"config.json", "model.safetensors", "merges.txt", "tokenizer_config.json"}
    assert (tmp_path / "new" / "merges.txt").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("vocab", ["1000000000", '"text"', '{"a": 1.5}', "true"])
def test_a_tokenizer_without_a_vocabulary_is_refused_by_its_file(tmp_path, vocab):
    (tmp_path / "tokenizer.json").write_text(f'{{"model": {{"vocab": {vocab}}}}}')
    with pytest.raises(ConfigError, match=r"tokenizer.json: this is no tokenizer: it needs a vocabulary"):
        find_largest_token(tmp_path)
