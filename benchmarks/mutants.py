"""The share of small faults in the code that the tests catch: the same faults in any source tree.

    python -m benchmarks.mutants [--root DIR] [--only ROOM] [--share 0.1] [--jobs 2]
    python -m benchmarks.mutants --draw [--root DIR] [--also DIR]     # makes mutants.yaml again

A line of ``mutants.yaml`` is one changed expression or statement of a function: ``<`` for ``<=``,
``and`` for ``or``, a number one larger, a dropped call, a ``return None``. In a tree it is found by
the function's full name, else by class and function or by the function alone, with the same
expression, in the one module that has them. Nothing is drawn from messages, annotations and
logging; ``--also``: only mutants that a second tree has too.

For each room one process imports and collects its fast tests, runs them without a change, and then
in a fork for each mutant, where the function's code is replaced in place: first the test file that
mirrors the module, then files that name the function or its class, then the rest, to the first
failure. Properties try a fifth of their examples, always the same.

    caught      a test failed
    timed_out   the tests took 60 s: caught too, but a slow machine can do that
    survived    no test failed; printed. Some of these compute the same as the code (a bound that is
                never met, a cache): no script can exclude them, so compare two trees by it
    gone        the tree has no such function and expression, or several; printed
    skipped     the code cannot be replaced in place (``super()`` is gone); printed
    share       (caught + timed_out) / (caught + timed_out + survived)
    seconds     for a mutant, by the clock

Processes that tests start afresh run the code without the change. Prints one JSON line last.
Exit code 1: a room's tests failed without a change; its cause is printed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import gc
import importlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain, pairwise, zip_longest
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import psutil
import pytest
import yaml
from hypothesis import settings

PACKAGES = ("async_opd", "rollouter", "teachers", "trainer")
SEED = 30
BOUND_S = 60.0
"""Of the tests of one mutant."""
OF_A_FUNCTION, LONGEST = 3, 160
"""Mutants of a function, and characters of an expression, at most."""
FAST = "not engine and not slow and not long and not whole"
CAUGHT, SKIPPED, BROKEN, SURVIVED = 1, 3, 4, 5
ENDED = {SURVIVED: "survived", SKIPPED: "skipped", BROKEN: "broken"}
"""The meaning of a fork's exit codes; every other, 0 too, is a mutant that is caught."""
Function = ast.FunctionDef | ast.AsyncFunctionDef
SIMPLE = ast.Expr | ast.Return | ast.Assign | ast.AnnAssign | ast.AugAssign
PAIRS = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Is, ast.IsNot), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
)
FLIPS: dict[type, Any] = {a: b for pair in PAIRS for a, b in (pair, pair[::-1])}
LOGGED = {"message", "warning", "warn", "info", "debug", "error", "exception", "print"}


class Mutant(NamedTuple):
    """A fault: the one ``expression`` of a function (``module:Class.name``) is ``change``."""

    function: str
    expression: str
    change: str


class Place(NamedTuple):
    """A function or method of a file; functions inside of it are its code."""

    path: Path
    name: str
    node: Function

    @property
    def key(self) -> tuple[str, str, int]:
        """As ``_key`` of its code: the first line is that of a decorator."""
        first = min(one.lineno for one in (self.node, *self.node.decorator_list))
        return str(self.path), self.name, first


# ── where a mutant is in a source tree ─────────────────────────────────────────────────────────

_text = cache(Path.read_text)
_written: Callable[[ast.AST], str] = cache(ast.unparse)
_parsed = cache(lambda path: ast.parse(_text(path)))


@cache
def _node(text: str) -> ast.AST:
    """The expression, or the statement, that a text is."""
    (node,) = ast.parse(text).body
    return node.value if isinstance(node, ast.Expr) else node


@cache
def _files(root: Path, patterns: tuple[str, ...]) -> list[Path]:
    found = {path for pattern in patterns for path in root.glob(pattern)}
    files = {file for path in found for file in (path.rglob("*.py") if path.is_dir() else [path])}
    return sorted(files)


def functions(path: Path) -> Iterator[Place]:
    """The functions and methods of a file."""

    def below(node: ast.Module | ast.ClassDef, prefix: str) -> Iterator[Place]:
        for child in node.body:
            if isinstance(child, ast.ClassDef):
                yield from below(child, f"{prefix}{child.name}.")
            elif isinstance(child, Function):
                yield Place(path, prefix + child.name, child)

    return below(_parsed(path), "")


def same(place: Place, mutant: Mutant) -> list[ast.AST]:
    """The nodes of a function that are the mutant's expression."""
    kind = ast.expr if isinstance(_node(mutant.change), ast.expr) else SIMPLE
    nodes = (node for top in place.node.body for node in ast.walk(top) if isinstance(node, kind))
    read = (one for one in nodes if not isinstance(getattr(one, "ctx", None), ast.Store | ast.Del))
    return [node for node in read if _written(node) == mutant.expression]


def located(root: Path, mutant: Mutant) -> tuple[Place, ast.AST] | None:
    """Where a tree has the mutant: once in one function. Else None."""
    module, name = mutant.function.split(":")
    short = name.rpartition(".")[2].strip("_")
    own = root.joinpath(*module.split("."))
    files = (own.with_suffix(".py"), own / "__init__.py"), _files(root, PACKAGES)
    ways: list[tuple[Iterable[Path], Callable[[Place], bool]]] = [
        ([one for one in files[0] if one.exists()], lambda one: one.name == name),
        (files[1], lambda one: one.name == name),
        (files[1], lambda one: one.name.rpartition(".")[2].strip("_") == short),
    ]
    for among, way in ways:
        every = (one for file in among if short in _text(file) for one in functions(file))
        found = [(one, node) for one in every if way(one) for node in same(one, mutant)]
        if found:
            return found[0] if len(found) == 1 else None
    return None


def _module(root: Path, path: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


# ── which changes there are ────────────────────────────────────────────────────────────────────


def nodes_of(node: ast.AST) -> Iterator[ast.AST]:
    """The node and those in it, without annotations, decorators, errors, messages and logging."""
    called = getattr(node.value if isinstance(node, ast.Expr) else node, "func", None)
    logged = getattr(called, "attr", getattr(called, "id", "")) in LOGGED
    if logged or isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
        return
    yield node
    for field, value in ast.iter_fields(node):
        if field not in ("annotation", "returns", "decorator_list"):
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from nodes_of(child)


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST, ast.AST]]:
    """The kind of each change of a node, the node that changes, and the one in its place."""
    match node:
        case ast.Compare(ops=[op]) if type(op) in FLIPS:
            yield "comparison", node, _with(node, ops=[FLIPS[type(op)]()])
        case ast.BoolOp(op=op):
            yield "and, or", node, _with(node, op=FLIPS[type(op)]())
        case ast.BinOp(op=op) | ast.AugAssign(op=op) if type(op) in FLIPS:
            if not any(_is_text(child) for child in ast.iter_child_nodes(node)):
                yield "arithmetic", node, _with(node, op=FLIPS[type(op)]())
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            yield "not", node, operand
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            yield "returned None", node, ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call() | ast.Await()):
            yield "dropped call", node, ast.Pass()
        case ast.If(test=test, orelse=[_, *_]) | ast.IfExp(test=test):
            yield "swapped branches", test, ast.UnaryOp(ast.Not(), test)
    assigned = isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign)
    if assigned and _written(node).startswith("self."):
        yield "dropped assignment", node, ast.Pass()
    for index, constant in enumerate(_numbers(node)):
        flag = isinstance(constant.value, bool)
        other = copy.deepcopy(node)
        _numbers(other)[index].value = not constant.value if flag else int(constant.value) + 1
        yield "True, False" if flag else "off by one", node, other


def _with(node: ast.AST, **fields: Any) -> ast.AST:
    return type(node)(**dict(ast.iter_fields(node)) | fields)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or isinstance(getattr(node, "value", None), str)


def _numbers(node: ast.AST) -> list[ast.Constant]:
    """The integers, True and False directly below an expression or a simple statement."""
    if not isinstance(node, ast.expr | SIMPLE) or isinstance(
        node, ast.UnaryOp | ast.Slice | ast.Tuple
    ):
        return []
    below = list(ast.iter_child_nodes(node))
    thin = [one for one in below if isinstance(one, ast.keyword | ast.Slice | ast.UnaryOp)]
    below += [one for node in thin for one in ast.iter_child_nodes(node)]
    found = [one for one in below if isinstance(one, ast.Constant)]
    return [one for one in found if isinstance(one.value, int)]


def mutants_of(root: Path, place: Place) -> Iterator[tuple[str, Mutant]]:
    """All mutants of a function that can be stored and found again, each with its kind."""
    name = f"{_module(root, place.path)}:{place.name}"
    nodes = (node for top in place.node.body for node in nodes_of(top))
    for kind, node, other in chain.from_iterable(map(changes, nodes)):
        mutant = Mutant(name, _written(node), ast.unparse(other))
        if len(mutant.expression) <= LONGEST and same(place, mutant) == [node]:
            yield kind, mutant


def drawn(roots: list[Path], count: int, sources: list[str]) -> list[Mutant]:
    """Mutants of the first tree that all trees have; the kinds in turn, at most ``count``."""
    kinds: defaultdict[str, list[Mutant]] = defaultdict(list)
    for place in chain.from_iterable(map(functions, _files(roots[0], tuple(sources)))):
        if place.node.name not in ("__repr__", "__str__"):
            for kind, mutant in mutants_of(roots[0], place):
                kinds[kind].append(mutant)
    pools = [kinds[kind] for kind in sorted(kinds)]
    for pool in pools:
        random.Random(SEED).shuffle(pool)
    taken: dict[Mutant, None] = {}
    for mutant in filter(None, chain.from_iterable(zip_longest(*pools))):
        beside = [one.expression for one in taken if one.function == mutant.function]
        free = len(beside) < OF_A_FUNCTION and mutant.expression not in beside
        if len(taken) < count and free and all(located(root, mutant) for root in roots):
            taken[mutant] = None
    return sorted(taken)


# ── a mutant in place of the code ──────────────────────────────────────────────────────────────


class NotReplaced(Exception):
    """The function's code cannot be replaced in place."""


def changed_code(place: Place, node: ast.AST, mutant: Mutant) -> CodeType:
    """The function's code with ``change`` in place of the node, also in the parsed file."""
    new = copy.deepcopy(_node(mutant.change))

    class Change(ast.NodeTransformer):
        def visit(self, one: ast.AST) -> Any:
            return ast.copy_location(new, node) if one is node else self.generic_visit(one)

    tree = ast.fix_missing_locations(Change().visit(_parsed(place.path)))
    pending = [compile(tree, str(place.path), "exec", dont_inherit=True)]
    while pending:
        code = pending.pop()
        if _key(code) == place.key:
            return code
        pending += [one for one in code.co_consts if isinstance(one, CodeType)]
    raise NotReplaced("the function is not compiled")


def live(root: Path) -> dict[tuple[str, str, int], list[FunctionType]]:
    """The functions of a tree that this process has, by file, name and first line."""
    gc.unfreeze()
    found = defaultdict(list)
    for one in gc.get_objects():
        if type(one) is FunctionType and one.__code__.co_filename.startswith(f"{root}/"):
            found[_key(one.__code__)].append(one)
    return found


def _key(code: CodeType) -> tuple[str, str, int]:
    return code.co_filename, code.co_qualname, code.co_firstlineno


def replace(known: list[FunctionType], code: CodeType) -> None:
    """All holders of a function run the other code. NotReplaced if it does not fit its closure."""
    if not known:
        raise NotReplaced("no import makes the function")
    for one in known:
        if one.__code__.co_freevars != code.co_freevars:
            raise NotReplaced("the change needs other variables of the functions around it")
        one.__code__ = code


# ── the tests of a room ────────────────────────────────────────────────────────────────────────


class Forks:
    """A plugin of pytest that runs the collected tests in a fork for each mutant."""

    def __init__(self, root: Path, mutants: list[Mutant], jobs: int) -> None:
        self._root = root
        self._mutants = mutants
        self._jobs = jobs
        self.outcomes: list[tuple[Mutant, str, float]] = []
        self.cause = "its tests cannot be collected"

    @pytest.hookimpl(tryfirst=True)
    def pytest_configure(self) -> None:
        """Properties try the same examples each time, and as few as in ``make check``."""
        quick = {"deadline": None, "max_examples": 20, "derandomize": True, "database": None}
        settings.register_profile("check", **quick)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Into the fork's output."""
        if report.failed:
            print(report.nodeid, report.longreprtext, flush=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Runs the tests without a change, then with each of the mutants."""
        if session.testsfailed or not session.items:
            return True
        places = {mutant: located(self._root, mutant) for mutant in self._mutants}
        found = {mutant: place for mutant, place in places.items() if place}
        self.outcomes = [(mutant, "gone", 0.0) for mutant in places.keys() - found.keys()]
        for place, _ in found.values():
            importlib.import_module(_module(self._root, place.path))
        # It reads HF_HUB_OFFLINE when it is imported, and commands that the tests run set that.
        importlib.import_module("huggingface_hub.constants")
        known = live(self._root)
        gc.freeze()

        def changed(mutant: Mutant) -> None:
            place, node = found[mutant]
            session.items.sort(key=partial(_distance, place))
            replace(known[place.key], changed_code(place, node, mutant))

        _, outcome, seconds, log = next(self._each(session, [None], changed))
        self.cause = "" if outcome == "survived" else f"{outcome} without a change:\n{log}"
        print(f"{len(session.items)} tests, {seconds:.1f} s without a change", flush=True)
        if not self.cause:
            for mutant, outcome, seconds, log in self._each(session, list(found), changed):
                if outcome == "broken":
                    raise RuntimeError(f"{mutant} could not be made:\n{log}")
                self.outcomes.append((mutant, outcome, seconds))
        return True

    def _each(
        self, session: pytest.Session, mutants: list[Any], changed: Callable[[Mutant], None]
    ) -> Iterator[tuple[Any, str, float, str]]:
        """Each mutant, its outcome, seconds and output; so many at a time as there are jobs."""
        pending = list(mutants)
        running: dict[int, tuple[Any, float, Path]] = {}
        while pending or running:
            while pending and len(running) < self._jobs:
                mutant, folder = pending.pop(0), Path(tempfile.mkdtemp(prefix="m"))
                sys.stdout.flush()
                sys.stderr.flush()
                pid = os.fork()
                if not pid:
                    _run(session, folder, partial(changed, mutant) if mutant else gc.enable)
                running[pid] = mutant, time.monotonic(), folder
            time.sleep(0.02)
            for pid, (mutant, since, folder) in list(running.items()):
                seconds = time.monotonic() - since
                ended, status = os.waitpid(pid, os.WNOHANG)
                outcome = ENDED.get(os.waitstatus_to_exitcode(status), "caught")
                if not ended and seconds > BOUND_S:
                    outcome = "timed_out"
                    _kill_below(pid)
                    os.kill(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                elif not ended:
                    continue
                del running[pid]
                log = (folder / "log").read_text(errors="replace")[-4000:]
                shutil.rmtree(folder, ignore_errors=True)
                yield mutant, outcome, seconds, log


def _distance(place: Place, test: pytest.Item) -> tuple[bool, bool]:
    """How far a test is from the function: its module's tests first, then files that name it."""
    names = [one for one in place.name.split(".") if not one.startswith("_")]
    text = _text(test.path)
    return test.path.stem != f"test_{place.path.stem}", not any(name in text for name in names)


def _run(session: pytest.Session, folder: Path, change: Callable[[], object]) -> None:
    """The tests in this fork, to the first failure. Ends the process."""
    code = BROKEN
    try:
        log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ["PYTEST_DEBUG_TEMPROOT"] = os.environ["TMPDIR"] = str(folder)
        tempfile.tempdir = str(folder)
        change()
        code = CAUGHT  # also when the tests end this process
        for test, following in pairwise([*session.items, None]):
            assert test
            test.ihook.pytest_runtest_protocol(item=test, nextitem=following)
            if session.testsfailed:
                break
        code = CAUGHT if session.testsfailed else SURVIVED
    except NotReplaced:
        code = SKIPPED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        _kill_below(os.getpid())
        os._exit(code)


def _kill_below(pid: int) -> None:
    with contextlib.suppress(psutil.Error):
        for one in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                one.kill()


def tested(given: argparse.Namespace, room: dict[str, Any]) -> dict[str, Any]:
    """The room's outcomes in a tree, whose packages and tests this process imports."""
    mutants = [Mutant(*one) for one in room["mutants"]][:: round(1 / given.share)]
    forks = Forks(given.root, mutants, given.jobs)
    tests = sorted(str(path) for pattern in room["tests"] for path in given.root.glob(pattern))
    options = ["--capture=no", "--disable-warnings", "--hypothesis-profile=check", "-m", FAST]
    plugins = ["-p", "no:cacheprovider", "-p", "no:xdist"]
    pytest.main([*options, *plugins, *tests], plugins=[forks])
    return {"cause": forks.cause, "outcomes": forks.outcomes}


def in_process(given: argparse.Namespace, room: str) -> dict[str, Any]:
    """``tested`` in a separate process, which finds the tree's packages first."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes"
        names = ("root", "stored", "share", "jobs")
        options = [f"--{name}={getattr(given, name)}" for name in names]
        # Not as a module: the tree may have a ``benchmarks`` too, without this file.
        command = [sys.executable, "-P", __file__, *options, f"--only={room}", f"--inside={out}"]
        environment = os.environ | {"PYTHONPATH": str(given.root), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, cwd=given.root, env=environment, check=False)
        if not out.exists():
            return {"cause": f"the process of its tests ended with {done.returncode}"}
        found: dict[str, Any] = json.loads(out.read_text())
        return found


def counted(outcomes: list[tuple[Any, str, float]]) -> dict[str, Any]:
    """The figures of some outcomes."""
    kinds = Counter(outcome for _, outcome, _ in outcomes)
    names = ("caught", "timed_out", "survived", "gone", "skipped")
    caught = kinds["caught"] + kinds["timed_out"]
    run = [seconds for _, outcome, seconds in outcomes if outcome != "gone"]
    return {
        "mutants": len(outcomes),
        **{name: kinds[name] for name in names},
        "share": round(caught / max(1, caught + kinds["survived"]), 4),
        "seconds": round(sum(run) / max(1, len(run)), 2),
    }


def write(given: argparse.Namespace, rooms: dict[str, Any]) -> dict[str, int]:
    """Draws and stores mutants; how many each room has."""
    roots = [given.root, (given.also or given.root).resolve()]
    for room in rooms.values():
        room["mutants"] = [list(one) for one in drawn(roots, room["count"], room["sources"])]
    text = yaml.safe_dump(
        rooms, width=10_000, sort_keys=False, default_flow_style=None, allow_unicode=True
    )
    given.stored.write_text(text)
    return {name: len(room["mutants"]) for name, room in rooms.items()}


def main() -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    here = Path(__file__).resolve()
    parser.add_argument("--root", type=Path, default=here.parents[1], help="the tree (this one)")
    parser.add_argument("--stored", type=Path, default=here.with_suffix(".yaml"), help="mutants")
    parser.add_argument("--only", metavar="ROOM", help="(all rooms)")
    parser.add_argument("--share", type=float, default=1.0, help="0.1: every tenth of each room")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="forks at a time")
    parser.add_argument("--draw", action="store_true", help="write the mutants")
    parser.add_argument("--also", type=Path, help="with --draw: a tree that has them too")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    given.root, given.stored = given.root.resolve(), given.stored.resolve()
    rooms: dict[str, Any] = yaml.safe_load(given.stored.read_text())
    if given.inside:
        given.inside.write_text(json.dumps(tested(given, rooms[given.only])))
        return 0
    if given.draw:
        print(json.dumps(write(given, rooms)))
        return 0
    outcomes: dict[str, Any] = {}
    chosen = [given.only] if given.only else list(rooms)
    for name in chosen:
        result = in_process(given, name)
        if result["cause"]:
            print(f"error in {name}: {result['cause']}", flush=True)
            continue
        outcomes[name] = result["outcomes"]
        for (function, expression, change), outcome, _ in result["outcomes"]:
            if outcome in ("survived", "gone", "skipped"):
                print(f"{outcome} {name} {function}: {expression} → {change}", flush=True)
    total = counted([one for some in outcomes.values() for one in some])
    print(json.dumps(total | {"rooms": {name: counted(some) for name, some in outcomes.items()}}))
    return int(len(outcomes) < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
