"""The Dockerfile, the compose file and the systemd unit fit the program and their schemas. No image
was ever built and no container started by these tests."""

import configparser
import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi")

from scope_runners.serve.group_control import END_S
from tests.deploy.files import DEPLOY, ROOT, documents, known_variables, served

DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
UNIT = (DEPLOY / "scope-rt.service").read_text()


def entrypoint() -> list[str]:
    (found,) = re.findall(r"^ENTRYPOINT (\[.*\])$", DOCKERFILE, re.M)
    words: list[str] = json.loads(found)
    return words


def compose() -> dict[str, Any]:
    (only,) = documents("compose.yaml")
    return only


def schema_errors(document: dict[str, Any]) -> list[str]:
    jsonschema_rs = pytest.importorskip("jsonschema_rs")
    package = find_spec("check_jsonschema")
    if package is None or package.origin is None:
        pytest.skip("check-jsonschema, which brings the schema of compose, is not installed")
    schema = Path(package.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    validator = jsonschema_rs.validator_for(json.loads(schema.read_text()))
    return [error.message for error in validator.iter_errors(document)]


def test_the_compose_file_fits_the_compose_specification() -> None:
    assert schema_errors(compose()) == []


def test_a_misspelt_key_does_not_fit_the_compose_specification() -> None:
    document = compose()
    document["services"]["server"]["network_mod"] = "host"
    assert any("network_mod" in message for message in schema_errors(document))


def test_the_compose_file_gives_the_server_options_and_variables_that_it_has() -> None:
    server = compose()["services"]["server"]
    assert entrypoint()[:2] == ["scope-rt", "serve"]
    asked = served([*entrypoint()[2:], *server["command"]])
    assert (asked.host, asked.log_format) == ("0.0.0.0", "json")
    assert set(server["environment"]) <= known_variables()
    assert f"{asked.folder}" in {volume.split(":")[1] for volume in server["volumes"]}


def test_what_the_compose_file_mounts_and_builds_is_there() -> None:
    services = compose()["services"]
    build = services["server"]["build"]
    assert (DEPLOY / build["context"]).resolve() == ROOT
    assert (ROOT / build["dockerfile"]).exists()
    mounts = [volume.split(":")[0] for each in services.values() for volume in each["volumes"]]
    named = {name for name in mounts if not name.startswith(".")}
    assert named == set(compose()["volumes"])
    assert all((DEPLOY / name).is_dir() for name in mounts if name.startswith("."))


def test_only_the_server_listens_beyond_loopback() -> None:
    services = compose()["services"]
    assert all("ports" not in each for each in services.values())
    assert "--web.listen-address=127.0.0.1:9090" in services["prometheus"]["command"]
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_who_stops_the_server_waits_for_the_chunk_and_the_recordings() -> None:
    patience_s = int(compose()["services"]["server"]["stop_grace_period"].removesuffix("s"))
    assert patience_s > END_S
    assert int(re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.M)[0]) > END_S


def test_what_the_dockerfile_copies_is_enough_to_build_the_wheel(tmp_path: Path) -> None:
    copied = re.findall(r"^COPY (?!--from)(.*)$", DOCKERFILE, re.M)
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for *sources, target in map(str.split, copied):
        for source in sources:
            assert f"!{source}" in allowed, "the build would not see it"
            place = tmp_path / target / source if target == "./" else tmp_path / target
            place.parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / source).is_dir():
                skipped = shutil.ignore_patterns("__pycache__")
                shutil.copytree(ROOT / source, place, symlinks=True, ignore=skipped)
            else:
                shutil.copyfile(ROOT / source, place)
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir"]
    subprocess.run([*build, tmp_path / "dist", tmp_path], check=True, timeout=100)
    (wheel,) = (tmp_path / "dist").glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "scope_runners/serve/page/index.html" in names
    assert "scope_runners/runbooks/hang.md" in names


def test_the_image_installs_extras_that_there_are() -> None:
    (extras,) = re.findall(r"'\.\[([\w,-]+)\]'", DOCKERFILE)
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", pyproject, re.M) for extra in extras.split(","))


def test_the_unit_starts_the_server_with_options_that_it_has() -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(UNIT)
    program, command, *words = unit["Service"]["ExecStart"].split()
    assert (Path(program).name, command) == ("scope-rt", "serve")
    assert str(served(words).folder) == f"/var/lib/{unit['Service']['StateDirectory']}"
    assert unit["Service"]["Environment"] == (
        f"XDG_RUNTIME_DIR=/run/{unit['Service']['RuntimeDirectory']}"
    )


def verified(unit: str, folder: Path) -> str:
    """What systemd says of it; "" where it is well."""
    file = folder / "scope-rt.service"
    file.write_text(re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit, flags=re.M))
    said = subprocess.run(
        ["systemd-analyze", "verify", file], capture_output=True, text=True, timeout=60
    )
    return said.stderr if said.returncode or "scope-rt.service" in said.stderr else ""


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not here")
def test_systemd_finds_nothing_wrong_with_the_unit(tmp_path: Path) -> None:
    assert not verified(UNIT, tmp_path)
    assert "KillMod" in verified(UNIT.replace("KillMode=", "KillMod="), tmp_path)
