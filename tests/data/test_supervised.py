"""Conversations in JSON lines: answers alone are targets, samples are padded or packed, mistakes have their line."""

import json
import re

import numpy as np
import pytest

import fsdpx
from fsdpx import nn, optim
from fsdpx.data import DataLoader, SupervisedDataset
from fsdpx.errors import ConfigError, DataError

END = 0
LINES = [
    {"prompt": "ab", "completion": "cd"},
    {"messages": [{"role": "user", "content": "e"}, {"role": "assistant", "content": "fg"}]},
    {"prompt": "abcdefgh", "completion": "i"},
]


def encode(text):
    return [ord(c) - ord("a") + 1 for c in text if c.isalpha()]


def bare(role, content):
    return "", content


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text("\n\n".join(map(json.dumps, LINES)) + "\n")
    return path


def test_answers_alone_are_targets(file):
    data = SupervisedDataset(file, encode, 6, end=END, template=bare)
    assert (len(data), data.left_out) == (2, 1)  # of the third the answer was cut off
    tokens, targets = data[0]
    assert tokens.tolist() == [1, 2, 3, 4, 0, 0]
    assert targets.tolist() == [-100, 3, 4, 0, -100, -100]
    tokens, targets = data[1]
    assert (tokens.tolist(), targets.tolist()) == ([5, 6, 7, 0, 0, 0], [6, 7, 0, -100, -100, -100])
    assert SupervisedDataset(file, encode, 20, end=END)[1][0].tolist()[:16] == encode("user e assistant fg")


def test_packed_conversations_have_a_segment_each_and_the_same_loss(file):
    apart, packed = (SupervisedDataset(file, encode, 7, end=END, packed=p, template=bare) for p in (False, True))
    assert len(packed) == 1
    (tokens, segments), targets = packed[0]
    assert tokens.tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert segments.tolist() == [0, 0, 0, 0, 1, 1, 1]
    assert targets.tolist() == [-100, 3, 4, 0, 6, 7, 0]
    model = nn.Llama(10, 8, 1, 2, seq_len=7, segments=True)
    losses = []
    for data in (packed, apart):
        trainer = model.as_distributed(loss=nn.CrossEntropy(), optimizer=optim.SGD(lr=0.1), precision="float64")
        (x, y), *_ = DataLoader(data, len(data))
        losses.append(trainer.evaluate(x if data is packed else (x, np.zeros_like(x)), y))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1, byte 2: this is no JSON"),
        ('\n{"prompt": "a",\n\n', "line 2, byte 16: this is no JSON"),
        ('{"prompt": null}', 'line 1: "prompt" is a text, this is NoneType'),
        ('{"prompt": "a", "completion": 3}', 'line 1: "completion" is a text, this is int'),
        ("3", "line 1: a line is an object, this is int"),
        ('\n{"text": "a"}', 'line 2: it has neither "prompt" and "completion" nor "messages": [\'text\']'),
        ('{"messages": [{"role": "user"}]}', 'line 1: a message has a "role" and a "content", texts both'),
        ('{"prompt": "", "completion": ""}', "line 1: a conversation needs two tokens or more"),
        ('{"prompt": "abcdefgh", "completion": "i"}', "no conversation has an answer within 5 tokens"),
    ],
)
def test_mistakes_have_their_line(tmp_path, text, said):
    path = tmp_path / "data.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=re.escape(said)):
        SupervisedDataset(path, encode, 4, end=END)
    with pytest.raises(DataError, match="No such file"):
        SupervisedDataset(tmp_path / "other", encode, 4, end=END)
    with pytest.raises(ConfigError, match=r"seq_len=0\): 1 or more"):
        SupervisedDataset(path, encode, 0, end=END)


def test_it_is_read_by_data_ranks_and_goes_on_where_it_was(file):
    data = SupervisedDataset(file, encode, 20, end=END)

    def read(comm):
        loader = DataLoader(data, 2, comm=comm, shuffle=True, seed=1)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        again = DataLoader(data, 2, comm=comm, shuffle=True, seed=1)
        again.load_state_dict(state)
        return [x.tolist() for x, _ in batches] == [x.tolist() for x, _ in again]

    assert fsdpx.spawn(read, 2) == [True, True]


@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf"])
def test_characters_that_end_lines_elsewhere_are_of_the_text(tmp_path, before):
    path = tmp_path / "data.jsonl"
    texts = ["a\u2028b", "c\u2029\u0085d\x0b\x0c", "e\U0001f600"]
    lines = [json.dumps({"prompt": text, "completion": "z"}, ensure_ascii=n == 2) for n, text in enumerate(texts)]
    path.write_bytes(before + "\r\n".join(lines).encode())
    asked = []
    data = SupervisedDataset(path, lambda text: asked.append(text) or encode(text), 6, end=END)
    assert asked[::2] == [text for text in texts if text]
    assert len(data) == 3


@pytest.mark.parametrize(
    ("line", "byte", "said"),
    [
        ('{"prompt": "é'.encode("latin-1"), 13, "0xe9 is not UTF-8: unexpected end of data"),
        (b"\xef\xbb\xbf{}", 1, "Unexpected UTF-8 BOM"),
        (b'{"prompt": "\\\\ud800 \\ud83d\\ude00 \\udc00"}', 34, r"'\udc00' in it is no text"),
        ('{"é": 1,}'.encode(), 10, ""),
        ("[1]".encode("utf-16"), 1, "0xff is not UTF-8: invalid start byte"),
        (b'{"prompt": "a", "prompt": "b"}', 1, "the name 'prompt' is there twice"),
        (b"[" * 100_000, 1, "lists and objects in it are more than 64 deep"),
    ],
)
def test_what_cannot_be_read_is_named_to_the_byte(tmp_path, line, byte, said):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\n' + line)
    with pytest.raises(DataError, match=re.escape(f"{path}, line 3, byte {byte}: this is no JSON: {said}")):
        SupervisedDataset(path, encode, 4, end=END)


def test_a_token_of_more_than_32_bits_is_named(file):
    with pytest.raises(DataError, match=r"data\.jsonl, line 1: a token does not fit into 32 bits: .*2147483648"):
        SupervisedDataset(file, lambda text: [2**31], 4, end=END)
