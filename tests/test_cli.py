import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from xla_b2t import cli
from xla_b2t.errors import UserError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def command(monkeypatch):
    """Puts a command named `train` in the place of the real one; call it with what its `run` does."""

    def replace(run):
        module = types.SimpleNamespace(
            SUMMARY="does as it is told",
            EXAMPLE="xla_b2t train --steps 3",
            add_arguments=lambda parser: parser.add_argument("--steps", type=int, default=1),
            run=run,
        )
        real = cli.importlib.import_module
        monkeypatch.setattr(
            cli.importlib, "import_module", lambda name: module if name.endswith("commands.train") else real(name)
        )

    return replace


def fail_with(error):
    def run(args):
        raise error

    return run


def test_cli_returns_what_the_command_returns(command):
    command(lambda args: args.steps)
    assert cli.main(["train", "--steps", "7"]) == 7


def test_cli_command_that_returns_nothing_succeeds(command):
    command(lambda args: None)
    assert cli.main(["train"]) == 0


def test_cli_user_error_prints_what_where_fix_and_exits_2(command, capsys):
    command(fail_with(UserError("lr is -1, expected a positive number", "demo.toml: train.lr", "set train.lr")))
    assert cli.main(["train"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == ("error: lr is -1, expected a positive number\n  where: demo.toml: train.lr\n  fix:   set train.lr\n")


def test_cli_user_error_with_json_is_an_object_on_stdout(command, capsys):
    command(fail_with(UserError("what", "where", "fix")))
    assert cli.main(["train", "--json"]) == 2
    out, err = capsys.readouterr()
    assert json.loads(out) == {"error": {"what": "what", "where": "where", "fix": "fix"}}
    assert err == ""


def test_cli_fault_of_ours_exits_1_with_its_traceback(command, capsys):
    command(fail_with(ZeroDivisionError("seven by nothing")))
    assert cli.main(["train"]) == 1
    err = capsys.readouterr().err
    assert "Traceback (most recent call last)" in err
    assert "ZeroDivisionError: seven by nothing" in err
    assert err.endswith("This is a fault of xla_b2t, not yours. Please report it with the lines above.\n")


def test_cli_interrupt_exits_130_without_a_traceback(command, capsys):
    command(fail_with(KeyboardInterrupt()))
    assert cli.main(["train"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["trian"], "invalid choice: 'trian'", "did you mean train?"),
        (["train", "--step", "3"], "unknown argument --step 3", "did you mean --steps?"),
        (["train", "--step=3"], "unknown argument --step=3", "did you mean --steps?"),
        (["train", "--zzz"], "unknown argument --zzz", "see xla_b2t train --help"),
        (["train", "--steps", "x"], "argument --steps: invalid int value: 'x'", "see xla_b2t train --help"),
        ([], "the following arguments are required: command", "see xla_b2t --help"),
    ],
)
def test_cli_wrong_arguments_are_user_errors_that_name_the_nearest(command, capsys, arguments, what, fix):
    command(lambda args: 0)
    assert cli.main(arguments) == 2
    lines = capsys.readouterr().err.splitlines()
    assert what in lines[0]
    assert lines[1] == "  where: the command line"
    assert lines[2] == f"  fix:   {fix}"


def test_cli_wrong_arguments_with_json_are_an_object(capsys):
    assert cli.main(["train", "--json", "--zzz"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["what"] == "unknown argument --zzz"


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_cli_help_of_every_command_shows_an_example_and_json(name, capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([name, "--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert "--json" in out
    assert "\nexample:\n  " in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_cli_example_of_every_command_parses(name):
    module = cli.importlib.import_module(cli.module_of(name))
    words = module.EXAMPLE.split()
    words = ["train", *words[3:]] if words[:3] == ["python", "-m", "xla_b2t.launch"] else words[1:]
    assert cli.parse(words).command == name
    assert not module.SUMMARY.endswith(".")


def run_module(*arguments):
    code = (
        "import sys, runpy; sys.argv[0] = 'xla_b2t'\ntry:\n    runpy.run_module(sys.argv.pop(1), run_name='__main__')\n"
    )
    code += "finally:\n    print(*sorted(sys.modules), file=sys.stderr)"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )


def test_cli_help_lists_the_commands_and_imports_nothing_heavy():
    done = run_module("xla_b2t", "--help")
    assert done.returncode == 0
    for name in cli.COMMANDS:
        assert f"\n    {name} " in done.stdout
    assert "exit codes: 0 done" in done.stdout
    heavy = {"numpy", "torch", "torch_xla", "h5py", "rich", "msgspec", "multiprocessing"}
    assert not heavy & set(done.stderr.split())


def test_launch_is_the_train_command():
    done = run_module("xla_b2t.launch", "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("usage: xla_b2t train ")


def test_cli_version_is_the_installed_one():
    done = run_module("xla_b2t", "--version")
    assert done.stdout == "xla_b2t 0.1.0\n"
