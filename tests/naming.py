"""How functions are named and described, and a draw of them to be guessed by somebody who has not read the code.

    python tests/naming.py                                    # shares of names and docstrings
    python tests/naming.py --draw 70 --bare 60 --seed 1       # questions, then the answers

The draw prints functions of 6 to 60 lines, without dunders and nested ones: the first with path and signature, the
others as `module.Class.name()` alone. A reader writes down what each one does, and compares with the docstring and body
that the second list points at: 1 for right, 0.5 for half, 0 for wrong. Nothing here is a test: a reader is the measure.
"""

import argparse
import ast
import pydoc
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from reading import folder_of

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "fsdpx"
VERBS = frozenset("""
abandon abort accept access accumulate activate adapt add adjust adopt advance advise aggregate agree align allocate
allow annotate answer append apply are argsort arrange assemble assert assign attach attend augment await backward
balance bind blend block box broadcast build bump cache calculate call can cancel cast catch check choose clamp
classify clean clear clip clone close coalesce collect combine commit compare compile complete compose compress
compute concatenate configure confirm connect consume contain continue contract convert convolve copy correct
correlate count cover create cut deal decide declare decode decorate decrease decref dedupe defer define delay delete
deliver demand depend derive describe deserialize detach detect determine diff digest disable discard dispatch display
distribute divide do does download drain draw drop dump duplicate emit empty enable encode encounter end ensure enter
enumerate erase escape estimate evaluate evict exchange exclude execute exit expand expect explain exponentiate export
expose extend extract fail fall feed fetch fill filter finalize find finish fit fits fix flatten flip flush fold
follow force forget format forward free freeze fuse gather generate get give grow guard guess handle has hash have
help hide hold hook host identify ignore import include increase increment index infer inform inherit init initialize
inject insert inspect install instantiate interleave interpolate interrupt intersect invalidate invert invoke is issue
iterate join keep kill label launch lay lead learn leave lend lerp let linearize link list listen load localize locate
lock log look loop lower maintain make manage map mark mask match matmul may measure meet memoize merge mix modify
monitor move multiply must mutate name narrow need needs normalize note notify number observe obtain offload open
optimize order outline overlap overload override pack pad pair parallelize parse pass patch pause peek permute pick
pin place plan plot poll pop populate post postpone predict prefetch prefix prepare prepend preserve price print probe
process produce profile project promote propagate prove provide prune publish pull purge push put quantize query queue
quit raise randomize rank reach read rebuild recalculate receive recompute reconstruct record recover recv redirect
reduce refer refine reflow refresh refuse register reject relate relax relay release reload remain remap remember
remove rename render repair repeat rephrase replace replay report request require resample rescale reserve reset
reshape reshard resize resolve respond restart restore restrict resume retain retry return reuse revert review revoke
rewire rewrite rotate round route run sample save say scale scan scatter schedule score search seed select send
serialize serve set settle shard share shift should show shrink shuffle shut sign simplify simulate skip sleep slice
smooth snap solve sort spawn specialize specify spin splice split spread stack stage start step stop store stream
stretch strip submit subtract suggest sum summarize supply support suppress swap switch sync synchronize tag take
tally tell terminate test throw tie tile time toggle tokenize touch trace track train transfer transform translate
transpose traverse treat trigger trim try tune turn unbind unblock undo unfreeze unload unlock unpack unregister
unroll unset unshard unwatch unwrap update upgrade upload upsample use validate verify view visit vote wait wake walk
warm warn warp was watch weigh widen wrap write yield zero
""".split())
PHRASES = {"all gather", "all reduce", "all to", "reduce scatter", "set up"}
"""Verbs of communication that begin with another word."""
PARTICIPLES = frozenset("""
begun bought bound broken brought built chosen dealt done drawn driven fallen fed flown found frozen given gone grown
held hidden kept known laid led left lost made meant met paid risen said seen sent shaken shown sold sought spelt
spent spoken stolen sunk swept sworn taken taught thought thrown told torn undone won worn wound woven written
""".split())
NOUNS_IN_ED = {"bed", "embed", "feed", "need", "red", "seed", "shed", "speed"}
OPENINGS = ("What", "Where", "How", "Which", "Whether")
"""Words with which a docstring describes instead of telling what to do."""


class Function(NamedTuple):
    """A function or method: where it is, and its node. kind: property, overload or plain."""

    file: Path
    qualified: str
    node: ast.FunctionDef | ast.AsyncFunctionDef
    kind: str

    @property
    def words(self) -> list[str]:
        split = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", self.node.name)
        return [word for word in split.strip("_").lower().split("_") if word]

    @property
    def is_participle(self) -> bool:
        """Whether the whole name is one, such as `made` or `placed`."""
        if len(self.words) != 1:
            return False
        word = self.words[0]
        return word in PARTICIPLES or (word.endswith("ed") and word not in NOUNS_IN_ED)

    @property
    def begins_with_verb(self) -> bool:
        words = self.words
        return words[0] in VERBS or " ".join(words[:2]) in PHRASES or (words[0] == "on" and len(words) > 1)

    @property
    def docstring(self) -> str:
        return ast.get_docstring(self.node) or ""

    @property
    def communicates(self) -> bool:
        return bool(re.search(r"\bCollective\b", self.docstring))

    @property
    def is_public(self) -> bool:
        return not any(part.startswith("_") for part in self.qualified.split("."))

    @property
    def parameters(self) -> list[str]:
        given = self.node.args
        names = [one.arg for one in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
        return [name for name in names if name not in ("self", "cls")]

    @property
    def size(self) -> int:
        return (self.node.end_lineno or 0) - self.node.lineno + 1


def functions_of(file: Path) -> Iterator[Function]:
    """All functions and methods of a file but dunders, in order; nested ones have a `<locals>` in their name."""

    def walk(node: ast.AST, path: tuple[str, ...]) -> Iterator[Function]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                yield from walk(child, (*path, child.name))
            elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                decorators = " ".join(ast.unparse(one) for one in child.decorator_list)
                kind = next((k for k in ("property", "overload") if k in decorators), "plain")
                if not (child.name.startswith("__") and child.name.endswith("__")):
                    yield Function(file, ".".join((*path, child.name)), child, kind)
                yield from walk(child, (*path, child.name, "<locals>"))
            else:
                yield from walk(child, path)

    yield from walk(ast.parse(file.read_text()), ())


def describe_names(title: str, functions: list[Function]) -> str:
    """A line of shares: names of one word, participles, verbs, and collective calls that begin with one."""
    plain = [one for one in functions if one.kind != "property"]
    collective = [one for one in plain if one.communicates]
    single = sum(len(one.words) == 1 for one in functions)
    return (
        f"{title:12}{len(functions):6,}{single / len(functions):8.1%}{sum(one.is_participle for one in functions):6}"
        f"{sum(one.begins_with_verb for one in plain) / len(plain):8.1%}"
        f"{sum(one.begins_with_verb for one in collective):6} of {len(collective)}"
    )


def list_documented() -> set[tuple[Path, str]]:
    """Return file and name of each class and function that the reference documents and that can be imported here."""
    found = set()
    for page in (ROOT / "docs/reference").glob("*.md"):
        for name in re.findall(r"auto(?:class|function|exception):: *([\w.]+)", page.read_text()):
            documented = pydoc.locate(name)
            if documented is not None:
                module = sys.modules[documented.__module__]  # type: ignore[attr-defined]
                found.add((Path(module.__file__ or ""), documented.__qualname__))  # type: ignore[attr-defined]
    return found


def describe_docstrings(title: str, functions: list[Function], documented: set[tuple[Path, str]]) -> str:
    """Return a line of shares: docstrings that open as an answer, and functions of the reference with Parameters.

    Methods that override a documented one and have no docstring of their own are left out."""
    texts = [one.docstring for one in functions if one.docstring]
    opening = sum(text.split(maxsplit=1)[0] in OPENINGS for text in texts)
    public = [
        one for one in functions
        if one.is_public and one.kind == "plain" and one.parameters and one.docstring
        and "<" not in one.qualified and (one.file, one.qualified.partition(".")[0]) in documented
    ]  # fmt: skip
    told = sum("Parameters\n" in one.docstring for one in public)
    return f"{title:12}{len(texts):6,}{opening / max(len(texts), 1):8.1%}{told:8,} of {len(public):,}"


def print_draw(functions: list[Function], signatures: int, bare: int, seed: int) -> None:
    """Print `signatures` functions with their signatures and `bare` by name alone, and then where each of them is."""
    fit = [one for one in functions if 6 <= one.size <= 60 and one.kind != "overload" and "<" not in one.qualified]
    drawn = random.Random(seed).sample(fit, signatures + bare)
    for number, one in enumerate(drawn, 1):
        module = one.file.relative_to(PACKAGE).with_suffix("").as_posix()
        if number <= signatures:
            returns = f" -> {ast.unparse(one.node.returns)}" if one.node.returns else ""
            print(f"{number:4}  {module}: {one.qualified}({ast.unparse(one.node.args)}){returns}")
        else:
            print(f"{number:4}  {module.rpartition('/')[2]}.{one.qualified}()")
    print("\nanswers")
    for number, one in enumerate(drawn, 1):
        first = one.docstring.partition("\n\n")[0].replace("\n", " ")
        print(f"{number:4}  {one.file.relative_to(ROOT)}:{one.node.lineno}  {first}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--draw", type=int, default=0, metavar="N", help="functions with path and signature")
    parser.add_argument("--bare", type=int, default=0, metavar="N", help="functions by name alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    functions = [one for file in sorted(PACKAGE.rglob("*.py")) for one in functions_of(file)]
    if options.draw or options.bare:
        print_draw(functions, options.draw, options.bare, options.seed)
        return
    parts: dict[str, list[Function]] = {"all": functions}
    for one in functions:
        name = (folder_of(one.file.relative_to(PACKAGE).as_posix()) or "top").split("/")[0]
        parts.setdefault(name, []).append(one)
    print(f"{'names':12}{'all':>6}{'1 word':>8}{'-ed':>6}{'verb':>8}{'  collective calls that begin with one'}")
    for name, some in parts.items():
        print(describe_names(name, some))
    documented = list_documented()
    print(f"\n{'docstrings':12}{'all':>6}{'what..':>8}  functions of the reference with Parameters")
    for name, some in parts.items():
        print(describe_docstrings(name, some, documented))


if __name__ == "__main__":
    main()
