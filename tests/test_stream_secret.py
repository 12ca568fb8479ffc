"""A secret is taken from one place, which only its owner can read, or refused in one sentence."""

import os
import stat
from pathlib import Path

import pytest

from scope_contracts.errors import UserInputError
from scope_rt.config import StreamConfig
from scope_rt.launch_environment import LaunchEnvironment
from scope_rt.stream_secret import StreamSecret, new_secret_file
from scope_runners.main import main

TEXT = "0123456789abcdef" * 4


def secret_of(**environ: str) -> StreamSecret | None:
    return LaunchEnvironment.from_environment(environ).secret


def kept(folder: Path, text: str = TEXT, mode: int = 0o600) -> str:
    path = folder / "secret"
    path.write_text(text)
    path.chmod(mode)
    return str(path)


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_a_secret_is_the_same_from_a_variable_and_from_a_file(tmp_path: Path, mode: int) -> None:
    path = kept(tmp_path, f"{TEXT}\n", mode)
    assert secret_of() is None
    assert secret_of(SCOPE_STREAM_SECRET=TEXT) == StreamSecret(TEXT.encode())
    assert secret_of(SCOPE_STREAM_SECRET_FILE=path) == StreamSecret(TEXT.encode())


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o660, 0o604, 0o700])
def test_a_file_that_others_may_read_is_refused_in_one_sentence(tmp_path: Path, mode: int) -> None:
    path = kept(tmp_path, mode=mode)
    want = f"SCOPE_STREAM_SECRET_FILE: {path} has mode {mode:04o}, so others may read it; `chmod 6"
    with pytest.raises(UserInputError) as refused:
        secret_of(SCOPE_STREAM_SECRET_FILE=path)
    assert str(refused.value).startswith(want)
    assert "\n" not in str(refused.value)
    assert TEXT not in str(refused.value)


def test_a_file_that_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("only root can give a file away")
    path = kept(tmp_path)
    os.chown(path, 65534, 65534)
    with pytest.raises(UserInputError, match="belongs to user 65534; give a file of your own"):
        secret_of(SCOPE_STREAM_SECRET_FILE=path)


def test_what_is_no_file_is_refused_at_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o600)
    for path in (pipe, tmp_path):
        with pytest.raises(UserInputError, match="is no file; give a file with the secret"):
            secret_of(SCOPE_STREAM_SECRET_FILE=str(path))
    with pytest.raises(UserInputError, match=r"cannot read .*absent \(No such file"):
        secret_of(SCOPE_STREAM_SECRET_FILE=str(tmp_path / "absent"))


@pytest.mark.parametrize("text", ["", "   ", "short", "x" * 31, "x" * 4097])
def test_a_secret_that_is_too_short_or_too_long_is_refused_unseen(
    tmp_path: Path, text: str
) -> None:
    path = kept(tmp_path, text)
    for given in ({"SCOPE_STREAM_SECRET": text}, {"SCOPE_STREAM_SECRET_FILE": path}):
        with pytest.raises(UserInputError, match=r"holds a secret of \d+ bytes; give 32 to 4096"):
            secret_of(**given)


def test_two_secrets_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(UserInputError, match="are both set; unset one of them"):
        secret_of(SCOPE_STREAM_SECRET=TEXT, SCOPE_STREAM_SECRET_FILE=kept(tmp_path))


def test_a_new_secret_is_its_owners_alone_and_gone_afterwards() -> None:
    with new_secret_file() as path, new_secret_file() as other:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        secrets = {secret_of(SCOPE_STREAM_SECRET_FILE=str(each)) for each in (path, other)}
        assert len(secrets) == 2
    assert not path.parent.exists()


def test_a_secret_is_no_part_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCOPE_STREAM_SECRET", TEXT)
    config = StreamConfig.load(plan="pp1")
    assert config == StreamConfig.of(plan="pp1")
    assert TEXT not in config.in_effect() + repr(config)


def test_a_command_with_a_secret_that_cannot_be_used_ends_with_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SCOPE_STREAM_SECRET_FILE", kept(tmp_path, mode=0o644))
    code = main(["stream", "--prompt", "a red circle", "--out", str(tmp_path / "a.mp4")])
    said = capsys.readouterr().err.strip()
    assert code == 2
    assert "has mode 0644, so others may read it" in said
    assert len(said.splitlines()) == 1
