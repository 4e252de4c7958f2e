"""What docker/ promises without building anything; docker/verify.sh builds, and runs this suite inside."""

import subprocess
import sys
import tomllib

import pytest

from tests.conftest import REPO

DOCKER = REPO / "docker"
KINDS = ("cpu", "gpu")


def lines(kind):
    """The instructions of a Dockerfile, a line each, without comments."""
    text = (DOCKER / f"{kind}.Dockerfile").read_text().replace("\\\n", " ")
    return [" ".join(line.split()) for line in text.splitlines() if line and not line.startswith("#")]


def requirements(*extras):
    command = [sys.executable, str(DOCKER / "requirements.py"), str(REPO / "pyproject.toml"), *extras]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def test_requirements_are_the_cores_and_those_of_extras_within_extras():
    project = tomllib.loads((REPO / "pyproject.toml").read_text())["project"]
    assert requirements() == project["dependencies"]
    found = requirements("test")
    for extra in ("test", "fast", "demo"):
        own = [each for each in project["optional-dependencies"][extra] if not each.startswith("gpupipe[")]
        assert set(own) <= set(found)
    assert not any(each.startswith("gpupipe") for each in found)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("kind", KINDS)
def test_image_is_not_root_and_has_its_entry_point_health_check_and_pinned_base(kind):
    found = lines(kind)
    (base,) = [line for line in found if line.startswith("ARG BASE_IMAGE=")]
    assert "-20" in base, "a tag with a date"
    assert [line for line in found if line.startswith("USER ")][-1] == "USER 1000:1000"
    assert 'ENTRYPOINT ["gpupipe"]' in found
    assert any(line.startswith("HEALTHCHECK ") and '"gpupipe", "selfcheck"' in line for line in found)
    assert found[-1] == "FROM runtime AS final"


def test_images_differ_in_what_the_gpu_needs_and_in_nothing_else():
    cpu, gpu = (set(lines(kind)) for kind in KINDS)
    assert {line.split()[0] for line in cpu - gpu} == {"HEALTHCHECK"}
    more = sorted(gpu - cpu)
    assert [line.split()[0] for line in more] == ["ENV", "ENV", "HEALTHCHECK"]
    assert more[0] == "ENV GPUPIPE_REQUIRE_GPU=1"
    assert "video" in more[1].partition("NVIDIA_DRIVER_CAPABILITIES=")[2].split(",")
    assert '"--gpu"' in more[2]
