"""The fine-tuning example: what it makes itself, and a folder with conversations."""

import json
import re
from pathlib import Path

import pytest

import fsdpx
from fsdpx.errors import ConfigError
from fsdpx.examples import finetune

tokenizers = pytest.importorskip("tokenizers")


@pytest.fixture(autouse=True)
def _alone():
    fsdpx.finalize()
    yield
    fsdpx.finalize()


def test_without_arguments_it_makes_all_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--first-steps", "100", "--steps", "100", "--out", str(tmp_path / "a"), "--seq-len", "24"]
    assert finetune.main(options) == 0
    out = capsys.readouterr().out
    losses = [float(n) for n in re.search(r"adapters: 100 steps, loss (\S+) -> (\S+)\n", out).groups()]
    assert losses[1] < 0.6 * losses[0]
    assert re.search(r"before: 'def size\(path\):' (['\"]).*\1\n", out)
    assert re.search(r"after: 'def size\(path\):' (['\"]).*\1\n", out)
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (config["r"], "blocks.1.attn.v" in config["target_modules"]) == (8, True)


def test_options_of_the_adapters_and_of_what_is_frozen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--targets", "mlp.down", "--alpha", "4", "--rank", "2", "--out", str(tmp_path / "a")]
    assert finetune.main(["--first-steps", "2", "--steps", "2", "--seq-len", "24", *options]) == 0
    assert "adapters: 2 steps" in capsys.readouterr().out
    config = json.loads((tmp_path / "a/adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (2, 4.0)
    assert config["target_modules"] == ["blocks.0.mlp.down", "blocks.1.mlp.down"]


def test_half_of_the_arguments_is_a_mistake() -> None:
    with pytest.raises(ConfigError, match="give a folder and data, or neither of them"):
        finetune.main(["folder"])


def test_a_folder_that_does_not_say_how_answers_end(tmp_path: Path) -> None:
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text("{}")
    said = f"{tmp_path}: neither generation_config.json nor config.json has an eos_token_id, .*: add one to config.json"
    with pytest.raises(ConfigError, match=said):
        finetune.main([str(tmp_path), "data.jsonl"])
