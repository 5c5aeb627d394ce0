"""The rules of the package's imports: they point down, they have no effects, and torch_xla has one room."""

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "xla_b2t"

LAYERS = (
    ("errors", "files", "config_words"),
    ("config",),
    ("data",),
    ("xla",),
    ("models",),
    ("evaluation",),
    ("training",),
    ("memory",),
    ("audit",),
    ("report",),
    ("commands",),
    ("cli",),
    ("launch", "__main__"),
)
"""Low to high: a module may import what stands before its own line, and its own package. See docs/ARCHITECTURE.md."""

NO_TORCH = ("errors", "files", "config", "cli", "data", "commands", "launch", "__main__")
"""May be imported where torch is not, or would be slow."""

ARGUED_STATE = {
    "xla_b2t.xla.scan: _loops": "a cache of pure values behind a lock: whoever builds one gets the same",
    "xla_b2t.xla.tpu_kernel: _written": "a cache of pure values behind a lock: whoever writes one gets the same",
    "xla_b2t.xla.target: _traced_for": "autograd's threads must see it; set only where nothing is run",
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules():
    """module name -> its parsed source."""
    return {module_name(path): ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))}


def is_for_typing(node):
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def imports(tree, top_only=False):
    """(line, dotted name) of every import that runs; with `top_only` those that run when the module is imported."""
    pending = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            # `from xla_b2t.data import groups` names a module, `from xla_b2t.errors import UserError` a thing in one.
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from ((node.lineno, name if name in modules() else node.module) for name in names)
        elif is_for_typing(node) or (top_only and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            continue
        else:
            pending.extend(ast.iter_child_nodes(node))


def layer(name):
    part = name.split(".")[1]
    found = [index for index, parts in enumerate(LAYERS) if part in parts]
    assert found, f"{name} belongs to no layer: add it to LAYERS and docs/ARCHITECTURE.md"
    return found[0]


def ours(name):
    return name.split(".")[0] == "xla_b2t" and name != "xla_b2t"


def test_imports_of_every_module_point_down():
    wrong = []
    for name, tree in modules().items():
        if name == "xla_b2t":
            continue
        for line, target in imports(tree):
            same_package = ours(target) and target.split(".")[1] == name.split(".")[1]
            if ours(target) and not same_package and layer(target) >= layer(name):
                wrong.append(f"{name}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_imports_have_no_cycle():
    graph = {name: {target for _, target in imports(tree) if ours(target)} for name, tree in modules().items()}
    done = set()

    def visit(name, path):
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for target in graph.get(name, ()):
                visit(target, [*path, name])
            done.add(name)

    for name in graph:
        visit(name, [])


def test_imports_of_torch_xla_are_in_the_xla_package_only():
    wrong = [
        f"{name}:{line} imports {target}"
        for name, tree in modules().items()
        if not name.startswith("xla_b2t.xla")
        for line, target in imports(tree)
        if target.split(".")[0] in ("torch_xla", "_XLAC", "jax", "jaxlib", "libtpu")
    ]
    assert not wrong, "\n".join(wrong)


def test_imports_are_absolute():
    relative = [
        f"{name}:{node.lineno}"
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not relative, relative


def test_packages_hold_nothing_but_a_docstring():
    for path in PACKAGE.rglob("__init__.py"):
        (only,) = ast.parse(path.read_text(encoding="utf-8")).body
        assert isinstance(only, ast.Expr), f"{path} holds more than a docstring"


def run_python(code, *args, cwd):
    done = subprocess.run(
        [sys.executable, "-c", code, *args], cwd=cwd, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WITHOUT_TORCH = """
import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
print(json.dumps([name for name in ("torch", "torch_xla", "jax") if name in sys.modules]))
"""


def test_import_of_data_config_and_commands_leaves_torch_out(tmp_path):
    names = [name for name in modules() if name.split(".")[1:2] and name.split(".")[1] in NO_TORCH]
    assert "xla_b2t.data" in names
    assert run_python(WITHOUT_TORCH, *names, cwd=tmp_path) == []


EFFECTS = """
import importlib, json, logging, multiprocessing, os, random, signal, sys, threading, warnings

foreign, own = (part.split(",") for part in sys.argv[1:])
for name in foreign:
    importlib.import_module(name)
import numpy, torch, torch_xla
from torch_xla import runtime

def state():
    loggers = [logging.root, *(log for log in logging.root.manager.loggerDict.values() if hasattr(log, "handlers"))]
    return {
        "environment": dict(os.environ),
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "logging handlers": sorted(repr(handler) for log in loggers for handler in log.handlers),
        "logging level": logging.root.level,
        "warning filters": [repr(entry) for entry in warnings.filters],
        "hooks": [repr(hook) for hook in (sys.excepthook, sys.displayhook, threading.excepthook)],
        "streams": [id(stream) for stream in (sys.stdout, sys.stderr)],
        "search path": list(sys.path),
        "signal handlers": [repr(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)],
        "start method": multiprocessing.get_start_method(allow_none=True),
        "children": len(multiprocessing.active_children()),
        "torch defaults": [repr(torch.get_default_dtype()), repr(torch.get_default_device()), torch.get_num_threads()],
        "torch random state": torch.get_rng_state().tolist(),
        "numpy random state": repr(numpy.random.get_state()),
        "random state": repr(random.getstate()),
        "runtime": torch_xla._XLAC._xla_runtime_is_initialized(),
        "files": sorted(os.listdir(".")),
    }

before = state()
for name in own:
    importlib.import_module(name)
after = state()
print(json.dumps({key: [before[key], after[key]] for key in before if before[key] != after[key]}))
"""


def test_import_of_every_module_has_no_effect(tmp_path):
    # What other packages do when they are imported is theirs: they come first.
    tops = {target for tree in modules().values() for _, target in imports(tree, top_only=True)}
    foreign = sorted(name for name in tops if not ours(name) and name != "xla_b2t")
    changed = run_python(EFFECTS, ",".join(foreign), ",".join(modules()), cwd=tmp_path)
    assert changed == {}


def test_modules_have_no_mutable_state():
    """Ranks may be threads: a module holds constants (upper case) and definitions, and no function rebinds them."""
    wrong = []
    for name, tree in modules().items():
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                made = isinstance(node.value, ast.List | ast.Dict | ast.Set | ast.ListComp | ast.DictComp | ast.SetComp)
                if isinstance(node.value, ast.Call):
                    made = ast.unparse(node.value.func) in ("list", "dict", "set", "deque", "defaultdict", "Counter")
                names = [f"{name}: {ast.unparse(target)}" for target in targets if not ast.unparse(target).isupper()]
                wrong += [entry for entry in names if made and entry not in ARGUED_STATE]
        wrong += [f"{name}: global {', '.join(node.names)}" for node in ast.walk(tree) if isinstance(node, ast.Global)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("name", sorted(modules()))
def test_module_says_what_it_is_for(name):
    assert ast.get_docstring(modules()[name]), f"{name} has no docstring"
