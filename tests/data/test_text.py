"""Text as tokens: windows of a stream, and examples with an answer."""

import json
import re
from itertools import pairwise

import numpy as np
import pytest

import fsdpx
from fsdpx import nn, optim
from fsdpx.data import DataLoader, SupervisedDataset, TextDataset, python_stdlib_folder
from fsdpx.data import dataset as windows
from fsdpx.errors import ConfigError, DataError


def content(dataset):
    """The bytes that the windows hold."""
    x, y = dataset.take(np.arange(len(dataset)))
    assert np.array_equal(x[1:, 0], y[:-1, -1])
    return bytes(x.ravel().astype(np.uint8)) + bytes(y[-1, -1:].astype(np.uint8))


def everything(path, split):
    """All bytes of a split, as one window."""
    return content(TextDataset(path, TextDataset(path, 1, split=split).nbytes - 1, split=split))


@pytest.fixture
def folder(tmp_path):
    left_out = ("d.bin", ".hidden.py", ".git/x.py", "__pycache__/x.py", "site-packages/x.py")
    read = {"b.py": b"bbbb", "a/z.py": b"zz", "a/notes.md": b"nnn", "c.txt": b""}
    for name, body in (read | dict.fromkeys(left_out, b"no")).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(body)
    return tmp_path


def test_windows_overlap_by_one_byte(tmp_path):
    file = tmp_path / "t"
    file.write_bytes(bytes(range(200, 211)))
    data = TextDataset(file, 3, split="all")
    assert len(data) == 3
    x, y = data[0]
    assert x.tolist() == [200, 201, 202]
    assert y.tolist() == [201, 202, 203]
    assert x.dtype == y.dtype == np.int32
    assert data[-1][1].tolist() == [207, 208, 209]
    assert TextDataset(str(file), 3, split="all", dtype="uint8")[0][0].dtype == np.uint8
    with pytest.raises(IndexError, match="sample 3 of 3"):
        data[3]
    assert [a.shape for a in data.take(np.array([], int))] == [(0, 3), (0, 3)]


def test_files_of_a_folder_in_order_as_one_text(folder):
    data = TextDataset(folder, 1, split="all")
    assert [f.relative_to(folder).as_posix() for f in data.files] == ["a/notes.md", "a/z.py", "b.py"]
    assert content(data) == b"nnnzzbbbb"
    assert content(TextDataset(folder, 4, split="all")) == b"nnnzzbbbb"
    assert content(TextDataset(folder, 1, split="all", suffixes=".md")) == b"nnn"
    assert "3 files, 9 bytes, seq_len=4, all" in repr(TextDataset(folder, 4, split="all"))


def test_several_paths_and_a_file_once(folder):
    assert content(TextDataset([folder / "b.py", folder, folder / "d.bin"], 1, split="all")) == b"bbbbnnnzzno"


@pytest.mark.parametrize("size", [100, 70_000, 300_000, 1_100_003])
def test_splits_are_disjoint_and_whole(tmp_path, size):
    random = np.random.default_rng(size)
    body = random.integers(0, 256, size, dtype=np.uint8).tobytes()
    cuts = [0, *sorted(random.integers(0, size, 5).tolist()), size]
    for i in range(6):
        (tmp_path / f"{i}.txt").write_bytes(body[cuts[i] : cuts[i + 1]])
    train, validation = everything(tmp_path, "train"), everything(tmp_path, "validation")
    assert everything(tmp_path, "all") == body
    assert len(train) + len(validation) == size
    assert abs(len(validation) - 0.1 * size) <= 16
    count = min(16, max(1, size // 65536))
    bounds = [size * i // count for i in range(count + 1)]
    edges = [b - (b - a) // 10 for a, b in pairwise(bounds)]
    assert train == b"".join(body[a:e] for a, e in zip(bounds, edges, strict=False))
    assert validation == b"".join(body[e:b] for e, b in zip(edges, bounds[1:], strict=True))
    for seq_len in (7, 8):
        data = TextDataset(tmp_path, seq_len, split="validation")
        assert content(data) == validation[: len(data) * seq_len + 1]
        assert len(data) == (len(validation) - 1) // seq_len


def test_only_some_files_are_open_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(windows, "MAX_OPEN_FILES", 3)
    for i in range(20):
        (tmp_path / f"{i:02}.txt").write_bytes(bytes([i, i]))
    data = TextDataset(tmp_path, 5, split="all")
    assert content(data) == bytes(i // 2 for i in range(36))
    assert data._map.cache.cache_info().currsize == 3


def test_the_standard_library_is_there():
    data = TextDataset(python_stdlib_folder(), 128)
    assert data.nbytes > 1_000_000
    assert not any("site-packages" in f.parts for f in data.files)
    loader = DataLoader(data, 8, rank=1, size=2, shuffle=True)
    for _, (x, y) in zip(range(3), loader, strict=False):
        assert x.shape == y.shape == (4, 128)
        assert np.array_equal(x[:, 1:], y[:, :-1])
    loader.close()


@pytest.mark.parametrize(
    ("error", "path", "options", "message"),
    [
        (ConfigError, "", {"seq_len": 0}, r"TextDataset\(seq_len=0\): a whole number of bytes, 1 or more, is needed"),
        (ConfigError, "", {"seq_len": 2.0}, r"TextDataset\(seq_len=2.0\)"),
        (ConfigError, "", {"split": "test"}, r"TextDataset\(split='test'\): choose one of train, validation, all"),
        (ConfigError, "", {"fraction": 1.0}, r"TextDataset\(fraction=1.0\): a number between 0 and 1"),
        (ConfigError, "", {"dtype": "float32"}, r"TextDataset\(dtype=float32\): an integer format that holds 0 to 255"),
        (ConfigError, "", {"dtype": "int8"}, r"TextDataset\(dtype=int8\)"),
        (DataError, "nowhere", {}, r"TextDataset: .*/nowhere does not exist \(looked from "),
        (DataError, "", {"suffixes": (".rst", ".tex")}, r"no text in .*: no file of \.rst, \.tex that is not empty"),
        (DataError, "c.txt", {}, r"no text in .*c\.txt: no file of "),
        (DataError, "", {"seq_len": 9, "split": "all"},
         r"seq_len 9 needs at least 10 bytes, but the all text of .* has 9: take a"),
        (DataError, "", {"seq_len": 1, "split": "validation"}, r"but the validation text of .* has 0"),
    ],
)  # fmt: skip
def test_options_and_texts_that_cannot_be_read(folder, error, path, options, message):
    with pytest.raises(error, match=message):
        TextDataset(folder / path, **{"seq_len": 2, **options})


def test_no_path_is_no_text():
    with pytest.raises(DataError, match="no path was given"):
        TextDataset([], 2)


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
        trainer = model.as_distributed(loss=nn.CrossEntropyLoss(), optimizer=optim.SGD(lr=0.1), precision="float64")
        (x, y), *_ = DataLoader(data, len(data))
        losses.append(trainer.evaluate(x if data is packed else (x, np.zeros_like(x)), y))
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1, byte 2: not valid JSON"),
        ('\n{"prompt": "a",\n\n', "line 2, byte 16: not valid JSON"),
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
        again = DataLoader(data, 2, comm=comm, shuffle=True, seed=1)
        again.load_state_dict(loader.state_dict())
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
        (b'{"prompt": "\\\\ud800 \\ud83d\\ude00 \\udc00"}', 34, r"'\udc00' in it is not valid text"),
        ('{"é" 1}'.encode(), 7, "Expecting ':' delimiter"),
        ("[1]".encode("utf-16"), 1, "0xff is not UTF-8: invalid start byte"),
        (b'{"prompt": "a", "prompt": "b"}', 1, "the name 'prompt' occurs twice"),
        (b"[" * 100_000, 1, "lists and objects in it are nested more than 64 deep"),
    ],
)
def test_what_cannot_be_read_is_named_to_the_byte(tmp_path, line, byte, said):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"prompt": "a", "completion": "b"}\n\n' + line)
    with pytest.raises(DataError, match=re.escape(f"{path}, line 3, byte {byte}: not valid JSON: {said}")):
        SupervisedDataset(path, encode, 4, end=END)


def test_a_token_of_more_than_32_bits_is_named(file):
    with pytest.raises(DataError, match=r"data\.jsonl, line 1: a token does not fit into 32 bits: .*2147483648"):
        SupervisedDataset(file, lambda text: [2**31], 4, end=END)
