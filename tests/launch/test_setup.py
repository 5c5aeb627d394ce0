"""launch/setup.sh against pretended interpreters: nothing is installed here."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
TOOLS = ("bash", "uname", "df", "awk", "sha256sum", "cut", "rm", "touch", "cat", "dirname", "mkdir", "cp", "env")

PYTHON = """#!/usr/bin/env bash
# Answers as an interpreter would; says what it was asked in the log.
echo "$(basename "$0") $*" >>"$LOG"
case "$1 ${2:-}" in
"- ") echo "$VERDICT" ;;
"--version ") echo "Python $VERDICT.9" ;;
"-m venv") mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
"-m pip") [[ ${3:-} == --version ]] || exit "${PIP_EXIT:-0}" ;;
esac
"""


class Clone:
    """A checkout with only what setting up needs, and a PATH with only the interpreters that are asked for."""

    def __init__(self, folder):
        self.folder = folder / "a clone"
        (self.folder / "launch").mkdir(parents=True)
        for name in ("setup.cfg", "launch/setup.sh", "launch/constraints.txt"):
            shutil.copy(ROOT / name, self.folder / name)
        self.bin = folder / "bin"
        self.bin.mkdir()
        for tool in (*TOOLS, "basename"):
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.log = folder / "log"
        self.stamp = self.folder / ".venv/installed"
        self.unfinished = self.folder / ".venv/unfinished"

    def add_python(self, name, verdict):
        path = self.bin / name
        path.write_text(PYTHON.replace("$VERDICT", verdict))
        path.chmod(0o755)

    def set_up(self, **environment):
        self.log.write_text("")
        environment = {"PATH": str(self.bin), "LOG": str(self.log), **environment}
        return subprocess.run(
            ["bash", str(self.folder / "launch/setup.sh")],
            env=environment,
            cwd=self.folder.parent,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )

    def asked(self):
        return self.log.read_text()


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def test_setup_in_a_fresh_clone_says_one_line_and_installs(clone):
    clone.add_python("python3", "3.12")
    done = clone.set_up()
    assert done.returncode == 0, done.stderr
    assert done.stderr == (
        "Setting up .venv with Python 3.12.9: torch and torch_xla take a few minutes and 7 GB, once.\n"
    )
    assert done.stdout == ""
    assert "python -m pip install -qq -c launch/constraints.txt -e .[dev,tpu-compiler]\n" in clone.asked()
    assert clone.stamp.exists()
    assert not clone.unfinished.exists()


@pytest.mark.parametrize("version", ["3.10", "3.13"])
def test_setup_leaves_the_tpu_compiler_out_where_it_has_no_wheels(clone, version):
    clone.add_python("python3", version)
    assert clone.set_up().returncode == 0
    assert "python -m pip install -qq -c launch/constraints.txt -e .[dev]\n" in clone.asked()


def test_setup_again_is_silent_and_asks_pip_nothing(clone):
    clone.add_python("python3", "3.12")
    clone.set_up()
    done = clone.set_up()
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert "pip" not in clone.asked()


@pytest.mark.parametrize("name", ["setup.cfg", "launch/constraints.txt"])
def test_setup_after_a_change_of_what_is_needed_installs_again(clone, name):
    clone.add_python("python3", "3.12")
    clone.set_up()
    with open(clone.folder / name, "a") as file:
        file.write("\n# changed\n")
    done = clone.set_up()
    assert done.stderr == "Bringing .venv in step with setup.cfg and launch/constraints.txt.\n"
    assert "pip install" in clone.asked()
    assert "-m venv" not in clone.asked()
    assert clone.set_up().stderr == ""


def test_setup_in_a_moved_clone_installs_again(clone):
    clone.add_python("python3", "3.12")
    clone.set_up()
    clone.folder = clone.folder.rename(clone.folder.with_name("moved"))
    assert "pip install" in (clone.set_up(), clone.asked())[1]


def test_setup_that_failed_begins_anew(clone):
    clone.add_python("python3", "3.12")
    done = clone.set_up(PIP_EXIT="1")
    assert done.returncode == 2
    assert "error: pip could not install the packages" in done.stderr
    assert f"\n  where: {clone.folder}/.venv\n" in done.stderr
    assert "\n  fix:   mend that, then make again: it begins anew\n" in done.stderr
    assert not clone.stamp.exists()
    assert clone.unfinished.exists()
    (clone.folder / ".venv/half a package").touch()
    assert clone.set_up().returncode == 0
    assert not (clone.folder / ".venv/half a package").exists()
    assert clone.stamp.exists()


def test_setup_with_an_environment_of_the_users_own_keeps_it(clone):
    clone.add_python("python3", "3.12")
    (clone.folder / ".venv/bin").mkdir(parents=True)
    shutil.copy(clone.bin / "python3", clone.folder / ".venv/bin/python")
    (clone.folder / ".venv/mine").touch()
    assert clone.set_up().returncode == 0
    assert (clone.folder / ".venv/mine").exists()


def test_setup_prefers_a_python_that_can_run_the_tpu_compiler(clone):
    clone.add_python("python3", "3.13")
    clone.add_python("python3.12", "3.12")
    assert "with Python 3.12.9:" in clone.set_up().stderr


def test_setup_takes_what_there_is(clone):
    clone.add_python("python3", "is Python 3.14")
    clone.add_python("python3.10", "3.10")
    assert "with Python 3.10.9:" in clone.set_up().stderr


def test_setup_takes_the_python_that_is_named(clone):
    clone.add_python("python3", "3.12")
    clone.add_python("mine", "3.10")
    assert "with Python 3.10.9:" in clone.set_up(PYTHON=str(clone.bin / "mine")).stderr


def test_setup_without_python_says_what_to_install(clone):
    done = clone.set_up()
    assert done.returncode == 2
    assert done.stderr == (
        "error: no Python from 3.10 to 3.13 was found\n"
        "  where: PATH\n"
        "  fix:   install Python 3.12, or name one: make PYTHON=/path/to/python3.12\n"
    )
    assert not (clone.folder / ".venv").exists()


def test_setup_with_a_python_too_new_names_it(clone):
    clone.add_python("python3", "is Python 3.14")
    done = clone.set_up()
    assert done.returncode == 2
    assert done.stderr.startswith(
        "error: no Python from 3.10 to 3.13 was found: python3 is Python 3.14\n  where: PATH\n"
    )
    assert "fix:   install Python 3.12" in done.stderr


def test_setup_without_the_venv_module_names_its_package(clone):
    clone.add_python("python3", "is Python 3.11 without venv")
    done = clone.set_up()
    assert done.returncode == 2
    assert done.stderr == (
        "error: Python cannot make an environment: python3 is Python 3.11 without venv\n"
        "  where: PATH\n"
        "  fix:   apt-get install python3.11-venv, then make again\n"
    )


def test_setup_on_a_full_disk_says_how_much_is_needed(clone):
    clone.add_python("python3", "3.12")
    (clone.bin / "df").unlink()
    (clone.bin / "df").write_text("#!/usr/bin/env bash\necho header\necho disk 1 1 2097152 99% .\n")
    (clone.bin / "df").chmod(0o755)
    done = clone.set_up()
    assert done.returncode == 2
    assert "error: the environment needs about 9 GB, and 2 GB are free\n" in done.stderr
    assert f"  where: {clone.folder}\n  fix:   free space on that disk\n" in done.stderr


def test_setup_on_another_kind_of_machine_is_refused(clone):
    clone.add_python("python3", "3.12")
    (clone.bin / "uname").unlink()
    (clone.bin / "uname").write_text("#!/usr/bin/env bash\necho Darwin arm64\n")
    (clone.bin / "uname").chmod(0o755)
    done = clone.set_up()
    assert done.returncode == 2
    assert done.stderr == (
        "error: torch_xla has wheels for Linux on x86-64 only\n"
        "  where: Darwin arm64\n"
        "  fix:   use such a machine, or a container of one\n"
    )


def make(*arguments):
    """Make says what it would do."""
    environment = {**os.environ, "MAKEFLAGS": "", "MAKELEVEL": ""}
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, check=True, env=environment
    )
    return done.stdout


def test_make_train_is_the_main_job_and_its_evaluation():
    said = make("train")
    assert "-m xla_b2t.launch --cores 8" in said
    assert said.index("setup.sh") < said.index("xla_b2t.launch") < said.index("-m xla_b2t evaluate runs/demo")


def test_make_test_lints_and_tests():
    said = make("test")
    assert said.index("setup.sh") < said.index("ruff check") < said.index("ruff format") < said.index("-m pytest")


def test_make_clean_keeps_the_environment_and_the_runs():
    said = make("clean")
    assert "rm -rf demo runs/demo" in said
    assert ".venv " not in said.replace("-path ./.venv -prune", "")


def test_ci_calls_the_test_command():
    assert os.access(ROOT / ".ci/run", os.X_OK)
    assert "\nmake test\n" in (ROOT / ".ci/run").read_text(encoding="utf-8")
