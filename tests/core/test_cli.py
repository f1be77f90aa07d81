"""The ``lowpeak`` command: its report, and subcommands of other distributions."""

import platform
import subprocess
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch

from lowpeak import cli


def test_env_reports_what_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith("- ") for line in lines)
    report = dict(line.removeprefix("- ").split(": ", 1) for line in lines)
    assert report["Python"] == platform.python_version()
    assert report["torch"] == torch.__version__
    assert (report["Devices"] == "CPU only") == (
        not (torch.cuda.is_available() or torch.xpu.is_available())
    )


def test_env_names_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lowpeak.environment.OTHERS", ("no-such-distribution",))
    monkeypatch.setattr("lowpeak.native.find_spec", lambda _name: None)
    cli.main(["env"])
    out = capsys.readouterr().out
    assert "- no-such-distribution: not installed" in out
    assert "- lowpeak._native: not built" in out


def test_env_imports_no_optional_package() -> None:
    code = (
        "import sys; from lowpeak.cli import main; main(['env']);"
        "assert not {'triton', 'transformers', 'trl', 'peft'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


def add_shout(subcommands: "cli.Subcommands") -> None:
    parser = subcommands.add_parser("shout")
    parser.add_argument("word")
    parser.set_defaults(run=lambda options: len(options.word))


def test_other_distributions_add_subcommands(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = EntryPoint("shout", f"{__name__}:add_shout", cli.COMMAND_GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: EntryPoints([entry]).select(group=group))
    assert cli.main(["shout", "lowpeak"]) == 7


def test_only_the_chosen_command_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = EntryPoint("broken", "no_such_package:add", cli.COMMAND_GROUP)
    monkeypatch.setattr(cli, "entry_points", lambda group: EntryPoints([entry]).select(group=group))
    assert cli.main(["env"]) == 0
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert "of no_such_package: see `lowpeak broken --help`" in capsys.readouterr().out
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        cli.main(["broken"])


def test_without_a_command_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.main([])
    assert "COMMAND" in capsys.readouterr().err
