"""`fsdpx generate`: a folder of transformers goes on with a text as transformers does."""

import pytest

import fsdpx
from fsdpx.__main__ import main

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
torch = pytest.importorskip("torch")

WORDS = "a rank that dies takes nothing with it and others go on".split()


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=32, bos_token_id=0, eos_token_id=1, pad_token_id=1,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(4.0)  # far from ties
    model.save_pretrained(tmp_path)
    words = tokenizers.models.WordLevel({word: n for n, word in enumerate(WORDS)}, unk_token="a")
    tokenizer = tokenizers.Tokenizer(words)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def run(*args):
    fsdpx.finalize()
    try:
        return main(["generate", *args])
    finally:
        fsdpx.finalize()


def test_the_text_is_that_of_transformers(folder, capsys):
    assert run(str(folder), "--prompt", "a rank that", "--max-new-tokens", "9") == 0
    out = capsys.readouterr().out
    model = transformers.LlamaForCausalLM.from_pretrained(folder)
    wanted = model.generate(torch.tensor([[0, 1, 2]]), max_new_tokens=9, do_sample=False)[0, 3:].tolist()
    assert out.startswith("a rank that")
    assert out.removeprefix("a rank that").split() == [WORDS[token] for token in wanted]


def test_a_mesh_and_a_strategy_change_no_word(folder, capsys):
    found = []
    for options in ([], ["--mesh", "pipe=1", "--strategy", "fsdp"]):
        assert run(str(folder), "--prompt", "a rank that", "--max-new-tokens", "5", *options) == 0
        found.append(capsys.readouterr().out)
    assert found[0] == found[1]
    assert run(str(folder), "--prompt", "a", "--mesh", "tensor=2") == 2
    assert "tensor" in capsys.readouterr().err


def test_a_prompt_of_other_bytes_is_named(folder, capsys):
    with pytest.raises(SystemExit):
        run(str(folder), "--prompt", "a \udce9")
    assert "argument --prompt: character 3, 0xe9, is not UTF-8" in capsys.readouterr().err


def test_what_is_missing_is_said(folder, capsys):
    (folder / "tokenizer.json").unlink()
    assert run(str(folder), "--prompt", "a") == 2
    assert "there is no tokenizer.json: trainer.generate takes tokens" in capsys.readouterr().err
    assert run(str(folder / "other"), "--prompt", "a") == 2
    assert "nothing is downloaded: give the path of a folder" in capsys.readouterr().err
