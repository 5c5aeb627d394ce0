"""The rules of the tree: the README shows it as it is, configurations load, modules stay short, documents stay true."""

import re
import subprocess
from pathlib import Path

import pytest

from xla_b2t.cli import COMMANDS, parse
from xla_b2t.config import Config, load

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*.toml"))
LONGEST_MODULE_LINES = 350


def files():
    """What is in the project: tracked, or new and not ignored."""
    done = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"not a git checkout that this user may read: {done.stderr.strip()}")
    return [Path(name) for name in done.stdout.splitlines() if (ROOT / name).exists()]


def readme_tree():
    """The paths that the README's file tree lists."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"## Files\n.*?```text\n(.*?)```", text, flags=re.DOTALL)
    paths, parents = [], []
    for line in block.splitlines():
        indent, name, role = re.fullmatch(r"( *)(\S+)\s+(\S.*)", line).groups()
        parents = [*parents[: len(indent) // 2], name.rstrip("/")]
        paths.append("/".join(parents))
        assert role, line
    return paths


def test_readme_tree_equals_the_tree_of_files():
    listed = set(readme_tree())
    shown = {str(Path(*path.parts[:1])) for path in files()} - {".gitignore"}
    shown |= {str(Path(*path.parts[:2])) for path in files() if path.parts[0] == "xla_b2t"} - {"xla_b2t/__init__.py"}
    assert listed == shown, f"only in the README: {sorted(listed - shown)}; only in the tree: {sorted(shown - listed)}"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_in_the_folder_loads(path):
    assert isinstance(load(path), Config)


def test_config_of_the_demo_is_the_one_that_is_shipped():
    assert (ROOT / "configs/demo.toml").resolve() == ROOT / "xla_b2t/demo.toml"


def test_modules_stay_short():
    long = {
        str(path): count
        for path in files()
        if path.suffix == ".py" and path.parts[0] == "xla_b2t"
        if (count := len((ROOT / path).read_text(encoding="utf-8").splitlines())) > LONGEST_MODULE_LINES
    }
    assert not long, f"longer than {LONGEST_MODULE_LINES} lines: {long}"


def test_files_name_no_place_of_one_machine():
    places = re.compile(r"(?<![\w.~])/(tmp|work|root|home/[a-z]\w*|opt|mnt|Users)/")
    wrong = []
    for path in files():
        if path.name == Path(__file__).name or (ROOT / path).is_symlink():
            continue
        try:
            lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
        except UnicodeDecodeError:
            continue
        wrong += [f"{path}:{number}: {line}" for number, line in enumerate(lines, 1) if places.search(line)]
    assert not wrong, "\n".join(wrong)


def documents():
    return [path for path in files() if path.suffix == ".md"]


def test_documents_link_to_what_exists():
    broken = []
    for path in documents():
        text = (ROOT / path).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            if "://" not in target and not (ROOT / path.parent / target).exists():
                broken.append(f"{path}: {target}")
    assert not broken, "\n".join(broken)


def test_documents_name_files_that_exist():
    """`xla_b2t/data/groups.py` in a document is a file; a decision may name what it replaced."""
    broken = []
    for path in documents():
        if path.parts[:2] == ("docs", "decisions") or path.name == "CHANGELOG.md":
            continue
        text = (ROOT / path).read_text(encoding="utf-8")
        for name in re.findall(r"`((?:xla_b2t|tests|configs|docs|examples|launch|benchmarks)/[\w/.-]+)`", text):
            if not (ROOT / name).exists():
                broken.append(f"{path}: {name}")
    assert not broken, "\n".join(broken)


def commands_in(text):
    """The arguments of every `xla_b2t ...` and `python -m xla_b2t...` line of a document's shell blocks."""
    for block in re.findall(r"```(?:sh|bash|console)\n(.*?)```", text, flags=re.DOTALL):
        for line in block.replace("\\\n", " ").splitlines():
            words = line.removeprefix("$ ").split("#")[0].split()
            if words[:3] == ["python", "-m", "xla_b2t.launch"]:
                yield ["train", *words[3:]]
            elif words[:1] == ["xla_b2t"] or words[:3] == ["python", "-m", "xla_b2t"]:
                yield words[1:] if words[0] == "xla_b2t" else words[3:]


def test_documents_show_commands_that_parse():
    seen = set()
    for path in documents():
        for arguments in commands_in((ROOT / path).read_text(encoding="utf-8")):
            assert parse(arguments).command == arguments[0], path
            seen.add(arguments[0])
    assert seen == set(COMMANDS), f"no document shows {set(COMMANDS) - seen}"
